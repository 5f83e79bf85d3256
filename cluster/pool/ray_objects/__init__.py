"""Actors and placement groups in Ray: their names, calls to them, their silence, their end."""
