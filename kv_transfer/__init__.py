"""How KV blocks get from one engine's memory into another's. No ray here, and no Request."""
