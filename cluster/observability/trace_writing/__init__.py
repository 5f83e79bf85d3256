"""Writes the request trace of an ingress."""
