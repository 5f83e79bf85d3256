"""Let a run of chaos reach into its own processes: Python loads this file at the start of each of them (PYTHONPATH).

Some faults cannot be made from outside: a step of one host's wall clock would step it for the whole machine, an event
loop can only be kept busy by something that runs on it, and Ray starts an actor or does not. Each process of the run
reads files in the directory that RAYPD_CHAOS_DIRECTORY names; tests/chaos/reach.py writes them. Without the variable
nothing happens.

clock            8 bytes, a double: seconds that are added to what time.time() says
busy-PID         the seconds for which the largest event loop of the process PID is to be kept busy
no-ingress       as many bytes as ingresses that Ray is to fail to start
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import mmap
import os
import struct
import sys
import threading
import time
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any

_POLL_S = 0.1
_CONTROLLERS_MODULE = "cluster.pool.ingresses.ingress_starter"
_NO_ENVIRONMENT = {"working_dir": "gcs://raypd_chaos_has_no_such_package.zip"}


def _step_clock(file: Path) -> None:
    with file.open("rb") as opened:
        offset = mmap.mmap(opened.fileno(), 8, access=mmap.ACCESS_READ)
    unix_s, unix_ns = time.time, time.time_ns

    def offset_s() -> float:
        seconds: float = struct.unpack_from("d", offset)[0]
        return seconds

    # gRPC makes its deadlines of time.time() and compares them with the machine's clock, which nobody has stepped. So
    # gRPC keeps the true clock: its Python modules by their names, and its compiled one, which has no frame, by a
    # `time` of its own. (If the clock is really stepped, as by libfaketime, both move together, and deadlines hold.)
    true_time = types.ModuleType("time")
    true_time.__dict__.update(vars(time))

    def stepped_s() -> float:
        compiled = sys.modules.get("grpc._cython.cygrpc")
        if compiled is not None and getattr(compiled, "time", None) is time:
            compiled.time = true_time  # type: ignore[attr-defined]  # a module's name
        asked_by: str = sys._getframe(1).f_globals.get("__name__", "")
        return unix_s() + (0.0 if asked_by.startswith("grpc") else offset_s())

    time.time = stepped_s
    time.time_ns = lambda: unix_ns() + int(offset_s() * 1e9)


def _spin(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


def _keep_busy_when_told(directory: Path) -> None:
    """Start a thread in each process that has an event loop; the loop with the most tasks is the one that serves."""
    loops: list[asyncio.AbstractEventLoop] = []
    run_forever = asyncio.BaseEventLoop.run_forever

    def watch() -> None:
        order = directory / f"busy-{os.getpid()}"
        while True:
            if order.exists():
                seconds = float(order.read_text())
                order.unlink()
                running = [loop for loop in loops if not loop.is_closed()]
                largest = max(running, key=lambda loop: len(asyncio.all_tasks(loop)))
                largest.call_soon_threadsafe(_spin, seconds)
            time.sleep(_POLL_S)

    def run_and_note(self: asyncio.BaseEventLoop) -> None:
        if not loops:
            threading.Thread(target=watch, daemon=True).start()
        loops.append(self)
        run_forever(self)

    asyncio.BaseEventLoop.run_forever = run_and_note  # type: ignore[method-assign]  # that is the point


class _Starter(Loader):
    """Run the controller's module, and let Ray fail to start ingresses for as long as it is told to."""

    def __init__(self, loader: Loader, file: Path) -> None:
        self._loader = loader
        self._file = file

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        found: Any = module
        remote_class, file = found.remote_class, self._file

        def failing(cls: type, **options: Any) -> Any:
            if file.exists() and (left := file.read_bytes()):
                file.write_bytes(left[1:])
                options["runtime_env"] = _NO_ENVIRONMENT
            return remote_class(cls, **options)

        found.remote_class = failing


class _Finder(MetaPathFinder):
    def __init__(self, file: Path) -> None:
        self._file = file

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _CONTROLLERS_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Starter(spec.loader, self._file)
        return spec


def _reach_in(directory: Path) -> None:
    _step_clock(directory / "clock")
    _keep_busy_when_told(directory)
    sys.meta_path.insert(0, _Finder(directory / "no-ingress"))


if _named := os.environ.get("RAYPD_CHAOS_DIRECTORY"):
    _reach_in(Path(_named))
