"""Connections between two engines: control streams, links and their data threads, checks of the other end."""
