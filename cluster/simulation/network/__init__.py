"""The network between simulated engines, and the handoffs that cross it."""
