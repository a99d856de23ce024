"""`make peers`: compares other libraries with this one, on the same weights, prompts, lengths and threads."""
