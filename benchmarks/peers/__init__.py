"""`make peers`: other libraries beside this one, on the same weights, prompts, lengths and threads."""
