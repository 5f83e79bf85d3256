"""Observes a cluster: metrics, its status, and the times of requests."""
