"""The help of every command is shown as it was written.

Tests of cluster/cli.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer.main
from rich.text import Text

from cluster.cli import app


def helps() -> Iterator[tuple[str, str]]:
    """Yield every help text with the command and the option that it is for."""
    group = typer.main.get_group(app)
    for name, command in sorted(group.commands.items()):
        yield name, command.help or ""
        for option in command.params:
            yield f"{name} {option.name}", getattr(option, "help", None) or ""


HELPS = list(helps())


@pytest.mark.parametrize(("name", "text"), HELPS, ids=[name for name, _ in HELPS])
def test_no_part_of_a_help_text_is_taken_for_markup(name: str, text: str) -> None:
    assert text.strip(), f"{name} has no help"
    assert Text.from_markup(text).plain == text
