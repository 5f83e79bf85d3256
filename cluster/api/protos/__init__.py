"""raypd.v1: its messages, and what both of its ends share. The client imports nothing else of this floor."""
