"""Prepares requests for vectors: embeddings, scores of classes, scores of documents. Prefilling engines answer them."""
