"""The processes of one run, told apart from all others by a mark in their environment, which children inherit."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

_MARK: Final = "RAYPD_CHAOS_RUN"
CONTROLLER: Final = "ray::Controller"
INGRESS: Final = "ray::IngressActor"
ENGINE: Final = "ray::EngineActor"


class MarkedProcesses:
    """Looked up anew at each call: whoever dies is replaced by another process."""

    def __init__(self) -> None:
        self._value = secrets.token_hex(8)

    @property
    def environment(self) -> dict[str, str]:
        """The environment that the first process of the run has to be started with."""
        return {_MARK: self._value}

    def all(self) -> Iterator[psutil.Process]:
        """Every process of the run that lives, orphans included."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._value and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # It has ended, or is not ours.

    def memory_files(self) -> set[Path]:
        """Files of shared memory that processes of the run have open or mapped now."""
        found: set[str] = set()
        for process in self.all():
            try:
                found |= {mapped.path for mapped in process.memory_maps()}
                found |= {str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()}
            except (psutil.Error, OSError):
                continue  # It has ended meanwhile, or the file has.
        return {Path(path) for path in found if path.startswith("/dev/shm/")}

    def titled(self, title: str) -> list[psutil.Process]:
        """Return the processes with this title, which is the beginning of their command line."""
        found = []
        for process in self.all():
            try:
                if " ".join(process.cmdline()).startswith(title):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def engine_at(self, address: str) -> psutil.Process:
        """The engine that listens there. Raises LookupError."""
        for process in self.titled(ENGINE):
            try:
                connections = process.net_connections("tcp")
            except psutil.NoSuchProcess:
                continue
            listening = {str(c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
            if address.rpartition(":")[2] in listening:
                return process
        raise LookupError(f"no engine listens at {address}")
