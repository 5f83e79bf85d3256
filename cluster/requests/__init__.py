"""Takes a request from its admission to its end: attempts, recovery, migration, the order of its output."""
