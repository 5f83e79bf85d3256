"""Runs work on untrusted input in a child process, with limits of time, memory and answer size.

A few kilobytes of input can cause such work to take minutes and gigabytes; it cannot be interrupted, and may crash. A
child process (bounded_child.py) has a memory limit, and is killed when a task takes too long.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

logger = logging.getLogger(__name__)

_START_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 10.0


class ProcessTooSlow(Exception):
    """The process did not answer a task in time, and was killed."""


class ProcessDied(Exception):
    """The process died during a task, or was killed because its answer was too large."""


class ProcessUnusable(Exception):
    """The process does not start, or was closed."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The limits of one task.

    timeout_s:      time until the answer
    memory_mib:     memory that the process may allocate beyond what it has after its start
    max_answer_mib: size of the answer
    """

    timeout_s: float
    memory_mib: int
    max_answer_mib: int


class BoundedProcess:
    """A child process, which is started by the first task, and again by the next task after it was killed.

    Only one thread at a time may call ask(); any thread may call close().
    """

    def __init__(self, command: Sequence[str], arguments: Sequence[str], limits: ProcessLimits, work: str) -> None:
        """Start no process yet.

        command: the program; it gets a file descriptor and its memory limit in bytes before the arguments
        work:    what the process does, for messages: "compiles grammars"
        """
        self._command = command
        self._arguments = arguments
        self._limits = limits
        self._work = work
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_closed = False

    def ask(self, task: bytes, greeting: Callable[[], bytes] = bytes) -> bytes:
        """Give the process a task, and block until it answers.

        greeting: returns the first message for a process that has to be started
        Raises ProcessTooSlow, ProcessDied, or ProcessUnusable. After the first two the next call starts a new process.
        """
        connection = self._connection or self._start(greeting)
        try:
            connection.send_bytes(task)
            if not connection.poll(self._limits.timeout_s):
                self._end()
                raise ProcessTooSlow(f"no answer within {self._limits.timeout_s:g} s")
            return connection.recv_bytes(self._limits.max_answer_mib << 20)
        except (EOFError, OSError) as error:
            self._end()
            if self._is_closed:
                raise ProcessUnusable(f"the process that {self._work} is closed") from error
            raise ProcessDied(f"the process that {self._work} has died") from error

    def close(self) -> None:
        """Kill the process; a thread that waits in ask() gets ProcessUnusable at once."""
        self._is_closed = True
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait(_END_TIMEOUT_S)

    def _start(self, greeting: Callable[[], bytes]) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        arguments = [theirs.fileno(), self._limits.memory_mib << 20, *self._arguments]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self._lock:
            if self._is_closed:
                raise ProcessUnusable(f"the process that {self._work} is closed")
            self._process = subprocess.Popen(
                [*self._command, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                # The process writes warnings about untrusted input, which would fill the log.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = ours
        theirs.close()
        try:
            ours.send_bytes(greeting())
            is_ready = ours.poll(_START_TIMEOUT_S) and ours.recv_bytes() == b""
        except (EOFError, OSError):
            is_ready = False
        if not is_ready:
            self._end()
            raise ProcessUnusable(f"the process that {self._work} does not start")
        logger.info("a process %s", self._work, extra={"pid": self._process.pid})
        return ours

    def _end(self) -> None:
        """Kill the process and close the connection. Only ask() and what it calls may call this method."""
        with self._lock:
            process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait(_END_TIMEOUT_S)
