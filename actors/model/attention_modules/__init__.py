"""Attention modules of transformers that need more than a registered attention function to reach the KV cache."""
