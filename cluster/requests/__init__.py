"""The life of a request: admission, attempts, recovery, migration, the order of its output."""
