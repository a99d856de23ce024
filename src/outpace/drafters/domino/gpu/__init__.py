"""Domino's head on a GPU. Where there is none, tests run it in Triton's interpreter and on CPU tensors."""
