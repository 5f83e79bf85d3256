"""Recurrent states: where they are in the KV cache, and how transformers' modules read and write them."""
