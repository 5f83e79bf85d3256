"""Connections between two engines: control streams, links, what one end sees of the other."""
