"""Stores, which keep blocks outside the KV cache: host memory, and those that installed packages add."""
