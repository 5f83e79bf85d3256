"""The command line of `raypd replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.commands.command_line import run
from cluster.errors import DecisionsDiffer, InvalidConfig


def replay(
    recordings: Annotated[
        list[Path],
        typer.Argument(help="Files that `decision_recording` has written, or directories of such files."),
    ],
) -> None:
    """Replay recorded decisions of a cluster, and report the first that differs.

    New schedulers and routers get the recorded calls in the recorded order,
    with the recorded times. The exit status is 1 if any decision differs.

    Example: raypd replay /var/log/raypd/decisions
    """

    def work() -> None:
        from actors.errors import InvalidRecording
        from cluster.simulation.replays import replay_recording

        table = Table("recording of", "decisions compared", "calls", "result")
        differing = []
        for path in _files(recordings):
            try:
                found = replay_recording(path)
            except InvalidRecording as error:
                raise InvalidConfig(str(path), [str(error).removeprefix(f"{path}: ")]) from error
            calls = ", ".join(f"{count} {name}" for name, count in found.counts.items() if count)
            result = (
                "equal" if found.ends_early is None else f"equal up to where the recording ends: {found.ends_early}"
            )
            if found.difference is not None:
                result = f"record {found.difference.record}: {found.difference.what}"
                differing.append(f"{found.who}: {result}")
            table.add_row(found.who, str(found.num_decisions), calls, result)
        Console(soft_wrap=True).print(table)
        if differing:
            raise DecisionsDiffer(differing)

    run(work)


def _files(paths: list[Path]) -> list[Path]:
    """Return the recordings, those of a directory in the order of their names. Raises InvalidConfig."""
    from actors.recording.recording_file import SUFFIX

    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not inside:
            raise InvalidConfig(str(path), [f"there is no file *{SUFFIX}"])
        found += inside
    return found
