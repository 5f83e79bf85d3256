"""The controller's actor: its start, its rounds, operators' changes, and its saved state."""
