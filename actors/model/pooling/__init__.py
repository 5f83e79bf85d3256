"""Vectors in place of tokens: embeddings, and what classification heads say."""
