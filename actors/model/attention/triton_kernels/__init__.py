"""Attention over the paged KV cache in kernels that Triton compiles."""
