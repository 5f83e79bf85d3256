"""The screen of `raypd status`."""
