"""Connects an ingress to engines: membership, sessions, streams of outputs, canaries."""
