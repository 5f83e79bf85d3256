"""The temporary directory of a Ray cluster that raypd starts, which only the user can enter.

Ray gives its directory, sockets and logs mode 0777, whatever the umask is. So Ray gets a directory inside another one
of mode 0700, which holds a locked file as long as the driver runs. A later start removes the directory of a killed
driver, but not before a day has passed, in which the logs can be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

_PREFIX: Final = "raypd-ray-"
_LOCK: Final = "in-use"
_KEPT_S: Final = 24 * 3600.0
_MAX_SOCKET_PATH: Final = 107
_LONGEST_SOCKET: Final = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.99")


class RayDirectory:
    """A new directory for one Ray cluster. path: the inner directory, which Ray gets"""

    def __init__(self, parent: Path | None = None) -> None:
        """Make the directory, and remove old ones of this user.

        parent: the directory to make it in; default: RAY_TMPDIR or the system's temporary directory, or /tmp if paths
        of Unix sockets would be too long there
        """
        parent = parent or _parent()
        _remove_old(parent)
        # mkdtemp() creates the directory with mode 0700.
        self._own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self._own / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = self._own / "r"

    @property
    def logs(self) -> Path:
        """The directory of the logs of the cluster's processes."""
        return self.path / "session_latest" / "logs"

    def remove(self) -> None:
        """Remove the directory with its content; Ray has to have ended."""
        shutil.rmtree(self._own, ignore_errors=True)
        self.keep()

    def keep(self) -> None:
        """Keep the directory with its logs after a failure; a start after a day or more removes the directory."""
        os.close(self._lock)


def _parent() -> Path:
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    longest = len(os.fsencode(parent)) + len(f"/{_PREFIX}xxxxxxxx/r") + _LONGEST_SOCKET
    return Path(parent if longest <= _MAX_SOCKET_PATH else "/tmp")


def _remove_old(parent: Path) -> None:
    now_s = time.time()
    for directory in parent.glob(f"{_PREFIX}*"):
        # A directory that vanishes meanwhile, or belongs to another user, is skipped.
        with contextlib.suppress(OSError):
            found = directory.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if is_ours and now_s - found.st_mtime > _KEPT_S and not _is_in_use(directory):
                shutil.rmtree(directory, ignore_errors=True)


def _is_in_use(directory: Path) -> bool:
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
