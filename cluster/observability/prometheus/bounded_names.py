"""Bounds how many values a label may have, whatever clients send."""

from __future__ import annotations

from typing import Final

OTHER: Final = "other"
"""The label's value for all names beyond the bound."""


class BoundedNames:
    """The first names that come, up to a number; all further ones count as OTHER."""

    def __init__(self, most: int) -> None:
        """most: how many names are told apart"""
        self._most = most
        self._names: set[str] = set()

    def bounded(self, name: str) -> str:
        """Return the name, or OTHER if too many names came before it."""
        if name in self._names:
            return name
        if len(self._names) >= self._most:
            return OTHER
        self._names.add(name)
        return name
