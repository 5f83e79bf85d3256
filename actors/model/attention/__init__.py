"""How a flattened batch attends to the paged KV cache."""
