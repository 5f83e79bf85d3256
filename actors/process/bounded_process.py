"""Our end of a process that does what must not be done here: work on what strangers send.

Such work can take minutes and gigabytes for a few kilobytes, cannot be interrupted, and may crash. In a process of its
own (bounded_child.py) it has a memory limit, and it is killed when it takes too long.
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
    """It had not answered in time, and was ended."""


class ProcessDied(Exception):
    """It died of its task, or its answer was too large; it was ended."""


class ProcessUnusable(Exception):
    """It does not start, or is closed."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The time, memory and size of answer that one task may take."""

    timeout_s: float
    memory_mib: int
    max_answer_mib: int


class BoundedProcess:
    """Starts when it is first needed, and again after it was ended. One thread at a time asks; any may close."""

    def __init__(self, command: Sequence[str], arguments: Sequence[str], limits: ProcessLimits, work: str) -> None:
        """command: what to run; it is given a file descriptor and its memory limit in bytes before the arguments

        work: what it does, for people: "compiles grammars"
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
        """Give it a task and wait for the answer.

        greeting: what it is told when it starts
        Raises ProcessTooSlow, ProcessDied, or ProcessUnusable.
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
        """End the process; whoever waits for it is told at once."""
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
                # It writes warnings about what strangers send.
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
        """By whoever asks."""
        with self._lock:
            process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait(_END_TIMEOUT_S)
