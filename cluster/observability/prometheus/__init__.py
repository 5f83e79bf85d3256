"""The metrics that Prometheus reads: their declarations, and what fills them."""
