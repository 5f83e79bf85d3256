"""What can be known before anything starts: models, settings, files, ports, certificates."""
