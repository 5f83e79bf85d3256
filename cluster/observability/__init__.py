"""Metrics, the status of a cluster, and the times of a request."""
