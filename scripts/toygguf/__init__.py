"""Writes GGUF files with random weights: toy models for tests and large synthetic shapes for benchmarks.

Knows nothing of leanstream_gguf or llama.cpp; needs only numpy.
"""
