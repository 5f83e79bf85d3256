"""Loads from other engines and from stores: KV of handoffs, prefixes, embeddings of images."""
