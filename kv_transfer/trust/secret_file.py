"""A file of the cluster's secrets: one a line, 64 hexadecimal digits each (`openssl rand -hex 32` makes one).

The first secret is the current one; the others are accepted as well. Empty lines, and lines that begin with #, are
ignored. The file is read again when it changes. A handshake succeeds if the two ends have one secret in common. So a
secret is replaced in two steps: the new one is put above the old one on every node, and then the old one is removed on
every node.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from kv_transfer.errors import SecretUnusable
from kv_transfer.trust.secret import MAX_ACCEPTED, NUM_SECRET_BYTES, ClusterSecret, ClusterSecrets, Purpose
from kv_transfer.trust.watched_file import WatchedFiles

logger = logging.getLogger(__name__)

_MAX_FILE_BYTES: Final = 64 * 1024
_SECRET: Final = re.compile(rf"[0-9a-fA-F]{{{2 * NUM_SECRET_BYTES}}}")
_FORBIDDEN_MODE: Final = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
"""The permissions that a secret file must not give. The group may read: Kubernetes gives secrets to a pod's group."""


class FileSecrets:
    """The secrets in a file, as it is now: a KeySource for any thread.

    If the file becomes unusable, the secrets that it had before stay accepted, and the log has the reason.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file. Raises SecretUnusable."""
        self._path = path
        self._lock = threading.Lock()
        self._file = WatchedFiles([path], clock)
        self._file.have_changed()
        self._secrets = ClusterSecrets(read_secret_file(path))

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """Return the keys for a purpose; see KeySource. The file is looked at once a second at most."""
        with self._lock:
            if self._file.have_changed():
                self._read_again()
        return self._secrets.keys(purpose)

    def _read_again(self) -> None:
        path = str(self._path)
        try:
            accepted = read_secret_file(self._path)
        except SecretUnusable as error:
            logger.error(
                "cannot read the cluster's secret file: the earlier secrets stay valid",
                extra={"path": path, "error": str(error)},
            )
            return
        self._secrets.replace(accepted)
        logger.info("the cluster's secrets were read", extra={"path": path, "num_secrets": len(accepted)})


def read_secret_file(path: Path) -> list[ClusterSecret]:
    """Read the secrets in a file. Raises SecretUnusable with the number of a wrong line, never with its content."""
    try:
        with path.open("rb") as file:
            refuse_open_mode(str(path), file)
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SecretUnusable(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise SecretUnusable(f"{path}: is larger than {_MAX_FILE_BYTES} bytes")
    secrets = [_read_line(path, number, line) for number, line in _lines(content)]
    if not 1 <= len(secrets) <= MAX_ACCEPTED:
        raise SecretUnusable(f"{path}: has {len(secrets)} secrets; 1 to {MAX_ACCEPTED} are possible, one a line")
    return secrets


def refuse_open_mode(path: str, file: BinaryIO) -> None:
    """Raise SecretUnusable unless only the open file's owner can use it, and perhaps its group read it."""
    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    if mode & _FORBIDDEN_MODE:
        raise SecretUnusable(f"{path}: has mode {mode:04o}, so others can use it; chmod 0600 (or 0440 for a group)")


def _lines(content: bytes) -> list[tuple[int, str]]:
    lines = enumerate(content.decode("ascii", errors="replace").splitlines(), 1)
    stripped = [(number, line.strip()) for number, line in lines]
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]


def _read_line(path: Path, number: int, line: str) -> ClusterSecret:
    if not _SECRET.fullmatch(line):
        raise SecretUnusable(f"{path}: line {number} is not {2 * NUM_SECRET_BYTES} hexadecimal digits")
    return ClusterSecret(bytes.fromhex(line))
