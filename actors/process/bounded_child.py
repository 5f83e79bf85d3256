"""Runs in the child process of a BoundedProcess, which works on untrusted input.

The process gets one end of a connection. The first message is a greeting, which it answers with an empty message; then
come tasks, one after another, each of which it answers. The process ends when the other end is closed, even during a
task.
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
"""The niceness of the process, which yields to the process that it works for: the two share the CPU's cores."""


def work(descriptor: int, memory_bytes: int, start: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """Answer tasks until the other end of the connection is closed, which ends the process.

    descriptor:   file descriptor of this process's end of the connection
    memory_bytes: memory that the process may allocate beyond what it has after start()
    start:        prepares the process with the greeting, and returns the function that answers tasks
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
    """Queue tasks; end the process once the other end is closed, since nobody waits for an answer any more."""
    while True:
        try:
            tasks.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _limit_memory(memory_bytes: int) -> None:
    """Limit the process's address space to what it uses now and memory_bytes more.

    On a system without /proc the current size is not known, and only the time limit of tasks remains.
    """
    usage = Path("/proc/self/statm")
    if usage.exists():
        used_bytes = int(usage.read_text().split()[0]) * resource.getpagesize()
        limit = used_bytes + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
