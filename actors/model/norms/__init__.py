"""Norms of a model on a CPU that take one operator instead of eight (docs/decisions/0038)."""
