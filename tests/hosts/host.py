"""A host: a network namespace, with processes and a directory of its own for as long as it is switched on.

Everything runs below one first process, which holds a namespace of process ids and a mount namespace. The kernel kills
all of a pid namespace with its first process, which ends with its standard input: so nothing outlives the test, even if
the test itself is killed.
"""

from __future__ import annotations

import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Final

import psutil

from tests.hosts.network import Cable

_BOOT_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 60.0


class HostProcess:
    """A process that was started on a host; its output is read all the time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []
        self._queue: Queue[str | None] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_for_line(self, part: str, timeout_s: float) -> str:
        """The next line with this in it."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except Empty:
                raise AssertionError(f"no {part!r} within {timeout_s:g} s:\n" + "\n".join(self.lines)) from None
            assert line is not None, f"it ended before it said {part!r}:\n" + "\n".join(self.lines)
            if part in line:
                return line

    def send_signal(self, number: int) -> None:
        """To the process itself: what enters the namespaces for it passes no signals on."""
        for child in psutil.Process(self._process.pid).children():
            child.send_signal(number)

    def wait(self, timeout_s: float = _END_TIMEOUT_S) -> int:
        """Its exit status."""
        status = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            self._queue.put(line.rstrip())
        self._queue.put(None)


class Host:
    """Off at first. directory: a path at which it has a file system of its own, empty at each start."""

    def __init__(self, cable: Cable, directory: Path) -> None:
        self.cable = cable
        self.address = cable.address
        self._directory = directory
        self._first: subprocess.Popen[bytes] | None = None
        self._first_pid = 0
        self._started: list[HostProcess] = []

    def switch_on(self) -> None:
        assert self._first is None, "it is on"
        self._directory.mkdir(exist_ok=True)
        first = f"mount -t tmpfs tmpfs {self._directory} && echo on && cat > /dev/null"
        entering = (
            f"ip netns exec {self.cable.namespace} unshare --mount --propagation private --pid --fork --mount-proc"
        )
        self._first = subprocess.Popen(
            [*entering.split(), "sh", "-c", first], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._first.stdout is not None
        ready, _, _ = select.select([self._first.stdout], [], [], _BOOT_TIMEOUT_S)
        assert ready, "the host does not start"
        assert self._first.stdout.readline() == b"on\n", "the host did not start"
        [holder] = psutil.Process(self._first.pid).children()
        self._first_pid = holder.pid

    def switch_off(self) -> None:
        """Kill everything on it, at once; does nothing if it is off."""
        if self._first is None:
            return
        first, self._first = self._first, None
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.close()
        first.wait(_END_TIMEOUT_S)
        first.stdout.close()
        started, self._started = self._started, []
        for process in started:
            process.wait()

    def run(self, command: Sequence[str], environment: Mapping[str, str], directory: Path) -> HostProcess:
        """Start a process on it, in this working directory."""
        assert self._first is not None, "it is off"
        entering = ["nsenter", "--target", str(self._first_pid), "--mount", "--net", "--pid", f"--wdns={directory}"]
        process = HostProcess(
            subprocess.Popen(
                [*entering, *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        self._started.append(process)
        return process

    def processes(self, part: str = "") -> list[psutil.Process]:
        """Return the processes on it that have this in their command line."""
        if self._first is None:
            return []
        namespace = Path(f"/proc/{self._first_pid}/ns/pid").readlink()
        return [process for process in psutil.process_iter() if _is_of(process, namespace, part)]


def _is_of(process: psutil.Process, namespace: Path, part: str) -> bool:
    try:
        return Path(f"/proc/{process.pid}/ns/pid").readlink() == namespace and part in " ".join(process.cmdline())
    except (OSError, psutil.NoSuchProcess):
        return False
