"""Runs trials in processes of their own, so that no model type can hang or end more than its own trial."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Final

from tests.models.trial import OUTCOME, Outcome

LIMIT_S: Final = 600.0
"""Seconds that one trial may take, the start of its process included."""
NUM_CHILDREN: Final = 2
COMMAND: Final = (sys.executable, "-m", "tests.models.trial")


def try_all(model_types: Sequence[str], limit_s: float = LIMIT_S) -> dict[str, Outcome]:
    """Try model types in NUM_CHILDREN processes at a time; returns their outcomes by model type."""
    with ThreadPoolExecutor(NUM_CHILDREN) as pool:
        shares = [model_types[index::NUM_CHILDREN] for index in range(NUM_CHILDREN)]
        outcomes = pool.map(lambda share: list(_try_share(share, limit_s)), shares)
        return {outcome.model_type: outcome for share in outcomes for outcome in share}


def _try_share(model_types: Sequence[str], limit_s: float) -> Iterator[Outcome]:
    """Try model types one after the other. A process that hangs or dies is replaced for those after it."""
    left = list(model_types)
    while left:
        for outcome in _try_in_one_process(tuple(left), limit_s):
            left.remove(outcome.model_type)
            yield outcome


def _try_in_one_process(model_types: Sequence[str], limit_s: float) -> Iterator[Outcome]:
    """Yield outcomes until all are known, or until one is a fault of the process."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with subprocess.Popen(
        [*COMMAND, *model_types], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        reader = threading.Thread(target=_read, args=(child.stdout, lines))
        reader.start()
        for model_type in model_types:
            try:
                line = lines.get(timeout=limit_s)
            except queue.Empty:
                yield Outcome(model_type, fault=f"no outcome within {limit_s:.0f} s")
                child.kill()
                break
            if line is None:
                yield Outcome(model_type, fault=f"its process ended with status {child.wait()}")
                break
            fields = json.loads(line)
            yield Outcome(**(fields | {"abilities": tuple(fields["abilities"])}))
        reader.join()


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Pass on the outcomes that a child prints, then None."""
    for line in stream:
        if line.startswith(OUTCOME):
            lines.put(line.removeprefix(OUTCOME))
    lines.put(None)
