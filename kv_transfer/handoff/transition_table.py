"""Tables that a transfer's machine runs: which action an event has in a state, and which states may follow.

A pair of state and event that is not in a machine's table changes nothing and has no instructions. docs/states.md shows
both tables as render() prints them; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
Action = TypeVar("Action", bound=Enum)


@dataclass(frozen=True)
class Transition(Generic[State, Action]):
    """One row of a table. meaning: the action, for people."""

    action: Action
    next_states: tuple[State, ...]
    meaning: str


Table = Mapping[tuple[State, Event], Transition[State, Action]]


def render(table: Table[State, Event, Action]) -> str:
    """Render a table as Markdown."""
    lines = ["| state | event | what it does | next |", "|---|---|---|---|"]
    lines += [
        f"| {state.name} | {event.name} | {row.meaning} | {', '.join(after.name for after in row.next_states)} |"
        for (state, event), row in table.items()
    ]
    return "\n".join(lines) + "\n"
