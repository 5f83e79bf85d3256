"""Prefixes from another engine's cache: deciding when to fetch them, and the scheduler's side of a fetch."""
