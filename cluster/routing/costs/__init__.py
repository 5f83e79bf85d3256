"""Predicted costs of placements: the durations of steps, and what they mean for a request and for others."""
