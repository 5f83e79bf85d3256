"""Takes a request from its admission to its end: attempts, recovery, moves, the order of its output."""
