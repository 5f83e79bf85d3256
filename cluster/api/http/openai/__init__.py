"""OpenAI's operations: chat, completions, embeddings, scores, and the parts of their answers."""
