"""Decides which engines start, drain and end, and how the planner's targets are reached. The clock is passed in."""
