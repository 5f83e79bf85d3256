"""KV blocks: the pool, the prefix cache, events about it."""
