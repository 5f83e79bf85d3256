"""Tries every causal language model type of transformers, for docs/models.md."""
