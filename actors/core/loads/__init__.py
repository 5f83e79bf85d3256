"""Loads from other engines and from stores: KV of handoffs, cached prefixes, and embeddings of images."""
