"""Decides how many engines a cluster needs, and in which roles. Pure: the clock and all measurements are passed in."""
