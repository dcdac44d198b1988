"""Calibration: what a model's neurons do on a text, and what leaving some of them out costs.

text.txt, the built-in text, is a fixed mixture of prose, technical writing and code: passages of books and documents in the public
domain (Carroll, Austen, Melville, Lincoln, Darwin, Doyle, Dickens, the Constitution of the United States) and pieces of this
package's own documentation and sources as they once were, under its own licence.
"""
