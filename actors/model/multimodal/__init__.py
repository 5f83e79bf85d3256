"""Images in prompts: their embeddings, and the positions of their tokens."""
