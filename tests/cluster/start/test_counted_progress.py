"""Counts of a start are drawn as a bar."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.progress_bar import ProgressBar

from cluster.start.counted_progress import progress_bar_of


def test_a_count_is_a_bar_beside_its_event() -> None:
    event = "decode-0: capturing CUDA graphs, 3 of 35 batch sizes"
    line = progress_bar_of(event)
    assert line is not None
    [bar] = line.columns[0].cells
    assert isinstance(bar, ProgressBar)
    assert (bar.completed, bar.total) == (2, 35)
    console = Console(width=100, record=True, quiet=False, force_terminal=True)
    with console.capture() as shown:
        console.print(line)
    assert event in shown.get()
    assert "━" in shown.get()


@pytest.mark.parametrize("event", ["decode-0: loading weights", "prefill-0: loaded (3 of it), 12 KV blocks"])
def test_other_events_have_no_bar(event: str) -> None:
    assert progress_bar_of(event) is None
