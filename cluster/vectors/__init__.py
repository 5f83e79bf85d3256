"""Requests for vectors in place of tokens: embeddings, classes, scores. Engines that compute prompts answer them."""
