"""Reads a model's configuration, and refuses what cannot be served."""
