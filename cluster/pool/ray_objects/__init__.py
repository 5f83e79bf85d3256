"""Actors, placement groups and nodes in Ray: how they are named, found, called, watched and ended."""
