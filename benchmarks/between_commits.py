"""Measure decode steps and handoffs of two commits side by side, for instance before and after KV came in groups.

    git worktree add /tmp/before 1ddee1b6^
    python -m benchmarks.between_commits /tmp/before . --pairs 15

Each tree has a prefill and a decode engine of the demo model in a process of its own (benchmarks/commit_engines.py).
Both processes are measured in turns: a pair is both commits, and pairs begin with either in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from cluster.bench.pairs import MIN_PAIRS, a_is_first, compare

_CHILD: Final = Path(__file__).with_name("commit_engines.py")
_MEASUREMENTS: Final = ("decode", "handoffs")


def run(
    before: Annotated[Path, typer.Argument(help="A tree of the earlier commit.")],
    after: Annotated[Path, typer.Argument(help="A tree of the later commit.")],
    pairs: Annotated[int, typer.Option(min=MIN_PAIRS)] = 15,
) -> None:
    """Measure, and print medians and the median ratio of pairs with its interval."""
    values: tuple[dict[str, list[float]], ...] = (defaultdict(list), defaultdict(list))
    with _engines_of(before) as one, _engines_of(after) as other:
        for pair in range(-1, pairs):
            for name in _MEASUREMENTS:
                for end in (0, 1) if a_is_first(pair) else (1, 0):
                    figures = (one, other)[end].measure(name)
                    # The first pair warms up.
                    for figure, value in figures.items() if pair >= 0 else ():
                        values[end][figure].append(value)
    table = Table("median", "before", "after", "after / before (90 % interval)")
    for figure in values[0]:
        found = compare(values[0][figure], values[1][figure])
        interval = f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
        table.add_row(figure, f"{found.median_a:.2f}", f"{found.median_b:.2f}", interval)
    Console(width=120).print(table)
    print(f"{pairs} pairs; load of this host at the end: {os.getloadavg()[0]:.1f}")


class _Engines:
    """The process with one tree's engines."""

    def __init__(self, asks: IO[str], answers: IO[str]) -> None:
        self._asks = asks
        self._answers = answers

    def measure(self, name: str) -> dict[str, float]:
        """Return the figures of one measurement."""
        self._asks.write(name + "\n")
        self._asks.flush()
        figures: dict[str, float] = json.loads(self._answers.readline())
        return figures


@contextmanager
def _engines_of(tree: Path) -> Iterator[_Engines]:
    """Start a tree's engines. -P and PYTHONPATH: every import is from that tree."""
    child = subprocess.Popen(
        [sys.executable, "-P", str(_CHILD)],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child, child.stdin:
        yield _Engines(child.stdin, child.stdout)


if __name__ == "__main__":
    typer.run(run)
