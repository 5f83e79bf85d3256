"""The engines of a cluster in the controller: what to start and stop, placement, health, rolling updates."""
