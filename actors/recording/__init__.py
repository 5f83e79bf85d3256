"""Records what an engine's scheduler is told and what it decides, and decides the same once more from the recording."""
