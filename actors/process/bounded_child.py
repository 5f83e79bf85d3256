"""The other end of a BoundedProcess: what a process does that works on what strangers send.

It is given one end of a connection. First comes a greeting, answered by an empty message; then one task after another,
each answered. It ends when the other end is closed, even while it works.
"""

from __future__ import annotations

import os
import queue
import resource
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

_NICENESS: Final = 10
"""Below the threads of what it works for: on a CPU they share the cores."""


def work(descriptor: int, memory_bytes: int, start: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """Work until the other end hangs up.

    memory_bytes: what all of it may take beyond what it has after its start
    start: makes ready with the greeting, and returns what answers tasks
    """
    connection = Connection(descriptor)
    answer = start(connection.recv_bytes())
    os.nice(_NICENESS)
    _limit_memory(memory_bytes)
    connection.send_bytes(b"")
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    while True:
        connection.send_bytes(answer(tasks.get()))


def _receive(connection: Connection, tasks: queue.SimpleQueue[bytes]) -> None:
    """Nobody waits for an answer any more once the other end is closed."""
    while True:
        try:
            tasks.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _limit_memory(memory_bytes: int) -> None:
    """From here on so much more. Where the system does not tell what is in use, there is only the time limit."""
    usage = Path("/proc/self/statm")
    if usage.exists():
        used_bytes = int(usage.read_text().split()[0]) * resource.getpagesize()
        limit = used_bytes + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
