"""Records the calls of an engine's scheduler and what it decides, and replays the recording."""
