"""Records what an ingress's routers are told and what they choose, and chooses once more from the recording."""
