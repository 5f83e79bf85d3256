"""Records the calls of an ingress's routers and what they choose, and replays the recording."""
