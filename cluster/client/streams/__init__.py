"""Streams of output that go on at another ingress when their call is cut."""
