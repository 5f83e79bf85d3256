"""Prefixes from another engine's cache: when to fetch them, and from where."""
