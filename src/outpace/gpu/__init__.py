"""Code for GPUs. It has never run on a GPU: tests run it in Triton's interpreter and on CPU tensors."""
