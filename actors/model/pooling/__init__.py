"""Computes vectors instead of tokens: embeddings, and the outputs of classification heads."""
