"""Code for GPUs. Where there is none, tests run it in Triton's interpreter and on CPU tensors."""
