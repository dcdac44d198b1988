"""Repacking: GGUF files rearranged so that one read fetches one expert or one cluster of neurons, and the way back."""
