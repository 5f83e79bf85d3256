"""`raypd serve` as a user runs it: a process of its own, its output, its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import TypeVar

import psutil
import yaml

from tests.patience import CLUSTER_S

ROOT = Path(__file__).parents[2]
Answer = TypeVar("Answer")


class ServeProcess:
    """Starts on construction; wait_until_ready() gives the address."""

    def __init__(
        self,
        config: dict[str, object],
        directory: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        run_by: Sequence[str] = (),
    ) -> None:
        """Start `raypd serve`.

        environment: variables besides ours, of which Ray's are left out.
        run_by: a command that runs it, such as prlimit.
        """
        config_file = directory / "cluster.yaml"
        config_file.write_text(yaml.safe_dump(config))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._process = subprocess.Popen(
            [
                *run_by,
                sys.executable,
                "-m",
                "cluster",
                "serve",
                "--config",
                str(config_file),
                "--port",
                "0",
                *arguments,
            ],
            cwd=ROOT,
            env=inherited | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._queue: Queue[str | None] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> str:
        """The ingress's host:port."""
        while True:
            line = self._next_line()
            assert line is not None, "serve ended before it was ready:\n" + "\n".join(self.lines)
            found = re.search(r"ready .* at (\S+:\d+)", line)
            if found is not None:
                return found.group(1)

    @property
    def http_address(self) -> str:
        """The ingress's host:port for HTTP, once it is ready."""
        found = next(filter(None, (re.search(r"http://(\S+:\d+)/v1", line) for line in self.lines)))
        return found.group(1)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end; returns the exit status. Everything that it started must be gone."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(number)
        return self._wait_until_gone(family)

    def stop_as_service(self) -> int:
        """Signal it and everything that it started, as systemd ends a service, and wait as stop() does."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        for pid in (self._process.pid, *(process.pid for process in family)):
            with contextlib.suppress(ProcessLookupError):  # One ends because another has.
                os.kill(pid, signal.SIGTERM)
        return self._wait_until_gone(family)

    def stop_group(self) -> int:
        """Signal its process group, as a shell's job control and `timeout` do, and wait as stop() does."""
        family = psutil.Process(self._process.pid).children(recursive=True)
        os.killpg(self._process.pid, signal.SIGTERM)
        return self._wait_until_gone(family)

    @property
    def is_alive(self) -> bool:
        """Whether nobody has stopped it yet."""
        return self._process.poll() is None

    def _wait_until_gone(self, family: list[psutil.Process]) -> int:
        status = self._process.wait(CLUSTER_S)
        self._close_output()
        _, alive = psutil.wait_procs(family, timeout=CLUSTER_S)
        assert not alive, f"left running: {[(process.pid, process.name()) for process in alive]}"
        return status

    def kill_if_alive(self) -> None:
        """For a test that failed half way."""
        if self._process.poll() is None:
            self.stop(signal.SIGKILL)
        self._close_output()

    def _close_output(self) -> None:
        self._reader.join(CLUSTER_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _next_line(self) -> str | None:
        try:
            return self._queue.get(timeout=CLUSTER_S)
        except Empty:
            raise AssertionError("no word from serve:\n" + "\n".join(self.lines)) from None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            self._queue.put(line.rstrip())
        self._queue.put(None)


def actor_process(title: str) -> psutil.Process:
    """The process of the one actor of this class that this test has started."""
    [process] = actor_processes(title)
    return process


def actor_processes(title: str) -> list[psutil.Process]:
    """The processes of the actors of this class. Their titles may name a call that waits, such as wait_for_end."""
    asked = ask_processes(psutil.Process.cmdline)
    return [process for process, words in asked if "".join(words[:1]).partition(".")[0] == f"ray::{title}"]


def process_listening_at(port: int) -> psutil.Process:
    """The one that this test has started."""
    for process, connections in ask_processes(psutil.Process.net_connections):
        if any(one.laddr.port == port for one in connections if not one.raddr):
            return process
    raise AssertionError(f"nobody listens at {port}")


def ask_processes(
    ask: Callable[[psutil.Process], Answer], top: psutil.Process | None = None
) -> Iterator[tuple[psutil.Process, Answer]]:
    """Ask each process that this test, or else `top`, has started; one that ends meanwhile is left out."""
    for process in (top or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            answer = ask(process)
            yield process, answer
