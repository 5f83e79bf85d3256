"""Profiles an engine at work by torch's profiler: which operators took how long.

The profiler sees what runs in the thread that starts it, so the engine's thread calls it, between steps. An engine that
is profiled is slower, but its answers are the same.
"""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from typing import Final

from torch.profiler import ProfilerActivity, profile

from actors.engine_profile import EngineProfile
from kv_transfer.device_kind import find_accelerator

_NUM_ROWS: Final = 40
_MAX_TRACE_BYTES: Final = 8 * 2**20
"""The limit of the compressed trace, which has to fit into one message."""


class EngineProfiler:
    """Makes one profile, from begin() to end(). The engine's thread has to call both."""

    def begin(self) -> None:
        """Begin the profile."""
        activities = [ProfilerActivity.CPU]
        if find_accelerator() is not None:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def end(self, *, with_trace: bool) -> EngineProfile:
        """End the profile, and return its summary.

        with_trace: whether the profile has a trace of every operator, gzipped; one that is too large is left out
        """
        self._profile.stop()
        sort_by = "self_cuda_time_total" if find_accelerator() is not None else "self_cpu_time_total"
        summary = self._profile.key_averages().table(sort_by=sort_by, row_limit=_NUM_ROWS, max_name_column_width=60)
        return EngineProfile(summary, self._trace() if with_trace else b"")

    def _trace(self) -> bytes:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = gzip.compress(path.read_bytes(), compresslevel=5)
        return trace if len(trace) <= _MAX_TRACE_BYTES else b""
