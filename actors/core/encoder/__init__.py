"""Multimodal items: which ones a step encodes, and which encoder outputs are kept."""
