"""Measures servers of OpenAI's API under load. `raypd bench` and benchmarks/ use it.

This package uses nothing of raypd's pool, engines or requests, so that it measures every server in the same way.
"""
