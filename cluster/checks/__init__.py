"""Checks before anything starts: models, settings, files, ports, certificates."""
