"""The operations of OpenAI's and vLLM's APIs: chat, completions, embeddings, scores, and the parts of their answers."""
