"""Moves of requests under way to other engines: of those that were preempted, and of those that wait."""
