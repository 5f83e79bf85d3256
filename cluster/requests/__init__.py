"""The life of a request: admission, attempts, recovery, moves, the order of its output."""
