"""The form of the tables that a transfer's machines run.

A table maps a state and an event to one row: the action, and the states that may follow. A pair of state and event
without a row changes nothing and has no instructions, except that a consumer's machine refuses a chunk in such a state.
docs/states.md shows both tables as render() prints them; a test compares the page with the tables.
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
    """One row of a table.

    next_states: the states that may follow; the action chooses among several
    meaning:     what the action does, for docs/states.md
    """

    action: Action
    next_states: tuple[State, ...]
    meaning: str


Table = Mapping[tuple[State, Event], Transition[State, Action]]


def render(table: Table[State, Event, Action]) -> str:
    """Return a table as Markdown, one line for each row in the table's order."""
    lines = ["| state | event | what it does | next |", "|---|---|---|---|"]
    lines += [
        f"| {state.name} | {event.name} | {row.meaning} | {', '.join(after.name for after in row.next_states)} |"
        for (state, event), row in table.items()
    ]
    return "\n".join(lines) + "\n"
