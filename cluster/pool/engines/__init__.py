"""The controller's engines: slots, placement, what to start and stop, rolling updates."""
