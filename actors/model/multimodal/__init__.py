"""Images: what the engine's model makes of them, and where their tokens stand."""
