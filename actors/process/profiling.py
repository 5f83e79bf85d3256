"""A profile of an engine at work, by torch's profiler: which operators took how long, for a bounded time.

The profiler sees what runs in the thread that starts it, so all of it is called in the engine's thread, between steps.
An engine that is profiled is slower, and answers the same.
"""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from actors.engine_profile import EngineProfile

_NUM_ROWS: Final = 40
_MAX_TRACE_BYTES: Final = 8 * 2**20
"""Compressed: it travels in one message."""


class EngineProfiler:
    """One profile, from begin() to end(); both in the engine's thread."""

    def begin(self) -> None:
        """Look from now on."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def end(self, *, with_trace: bool) -> EngineProfile:
        """Look no longer."""
        self._profile.stop()
        sort_by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        summary = self._profile.key_averages().table(sort_by=sort_by, row_limit=_NUM_ROWS, max_name_column_width=60)
        return EngineProfile(summary, self._trace() if with_trace else b"")

    def _trace(self) -> bytes:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = gzip.compress(path.read_bytes(), compresslevel=5)
        return trace if len(trace) <= _MAX_TRACE_BYTES else b""
