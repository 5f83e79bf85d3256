"""Orders to the processes of a run, which tests/chaos/inside/sitecustomize.py carries out in each of them."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

_INSIDE: Final = Path(__file__).parent / "inside"


class Reach:
    """The directory through which a run reaches into its processes; it has to exist before the first of them starts."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.step_clock(0.0)

    @property
    def environment(self) -> dict[str, str]:
        """The environment that the first process of the run has to be started with; it hands it on."""
        paths = [str(_INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"RAYPD_CHAOS_DIRECTORY": str(self._directory), "PYTHONPATH": os.pathsep.join(paths)}

    def step_clock(self, offset_s: float) -> None:
        """Let the wall clock of every process be this far from the true one."""
        file = self._directory / "clock"
        with file.open("r+b" if file.exists() else "wb") as opened:
            opened.write(struct.pack("d", offset_s))

    def keep_busy(self, pid: int, seconds: float) -> None:
        """Keep the largest event loop of a process busy for so long."""
        order = self._directory / f"busy-{pid}"
        written = order.with_suffix(".new")
        written.write_text(f"{seconds}")
        written.rename(order)

    def is_taken(self, pid: int) -> bool:
        """Whether the process has taken its order."""
        return not (self._directory / f"busy-{pid}").exists()

    def fail_ingresses(self, count: int) -> None:
        """Let Ray fail to start the next so many ingresses: their environment cannot be made."""
        (self._directory / "no-ingress").write_bytes(b"x" * count)

    @property
    def num_ingresses_to_fail(self) -> int:
        """How many are still to fail."""
        return (self._directory / "no-ingress").stat().st_size
