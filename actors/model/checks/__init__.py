"""Checks of a loaded model: weights, fingerprint, a comparison with transformers."""
