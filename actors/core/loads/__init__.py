"""Loads from elsewhere: KV of handoffs, prefixes, embeddings of images."""
