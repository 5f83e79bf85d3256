"""Transfers KV blocks from one engine's memory into another's. This package imports neither ray nor Request."""
