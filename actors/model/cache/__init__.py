"""The KV cache's memory."""
