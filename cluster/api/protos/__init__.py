"""The messages of raypd.v1, and what client and server share. The client imports nothing else of cluster/."""
