"""Stories of requests: the phases of each one on a time axis, and the cause of its slowness in words."""
