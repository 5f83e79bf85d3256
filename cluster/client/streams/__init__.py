"""Calls that go on at another ingress: attempts, progress, batches."""
