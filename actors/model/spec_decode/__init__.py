"""Drafting tokens, and checking several of them in one forward."""
