"""The files of one request trace: parts that follow one another, bounded in size and in number.

Theory: at most one file is open. Lines are in their file whole or not at all: where a write fails, what it has written
is cut off again, and if even that fails, the file is given up and the next line begins another one. Files of an
ingress, those of its earlier incarnations included, have names that sort by age, and only these names are ever removed.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from actors.core.requests.block_hash import BlockHashKey
from cluster.traces.request_trace import BlockHashes, TraceHeader, encode_line

_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
_MAX_TRIES: Final = 10_000


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """The limits on the files of an ingress. max_file_bytes: a line that crosses it is the last one of its file"""

    max_file_bytes: int
    max_files: int


class TraceParts:
    """The files of one trace. For one thread; every method may wait for the disk, and raises OSError."""

    def __init__(
        self,
        directory: Path,
        header: TraceHeader,
        limits: TraceLimits,
        cluster_key: BlockHashKey | None = None,
    ) -> None:
        """Open nothing yet.

        header:      of the first part; further ones have the same one but for the part's number
        cluster_key: the key of the hashes if header.block_hashes is CLUSTER
        """
        self._directory = directory
        self._header = header
        self._limits = limits
        self._cluster_key = cluster_key
        self._part = header.part - 1
        self._fd: int | None = None
        self._size_bytes = 0
        self._hash_key: BlockHashKey | None = None
        ingress = re.sub(r"[^\w-]", "_", header.ingress)
        begun = datetime.fromtimestamp(header.began_at_s, UTC)
        self._stem = f"requests-{ingress}-{begun:%Y%m%dT%H%M%S}"
        self._own_name = re.compile(rf"requests-{re.escape(ingress)}-\d{{8}}T\d{{6}}-\d{{6}}\.jsonl")

    @property
    def room_bytes(self) -> int:
        """How many bytes the open file takes before another part begins. The line that crosses it belongs here."""
        return self._limits.max_file_bytes - self._size_bytes

    def ready(self) -> BlockHashKey | None:
        """Have a file open that takes another line; returns the key of the hashes in it, None if it has none."""
        if self._fd is not None and (self._size_bytes >= self._limits.max_file_bytes or _is_removed(self._fd)):
            self.close()
        if self._fd is None:
            self._open()
        return self._hash_key

    def append(self, lines: bytes) -> None:
        """Write lines to the file that ready() has opened: all of them, or none if an error is raised."""
        assert self._fd is not None, "ready() comes first"
        try:
            _write_all(self._fd, lines)
        except OSError:
            self._cut_off()
            raise
        self._size_bytes += len(lines)

    def close(self) -> None:
        """Close the file, if one is open."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    def _open(self) -> None:
        self._directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        fd, path = self._create()
        header = TraceHeader(
            began_at_s=self._header.began_at_s,
            ingress=self._header.ingress,
            part=self._part,
            block_hashes=self._header.block_hashes,
        )
        first = encode_line(header)
        try:
            _write_all(fd, first)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._fd, self._size_bytes = fd, len(first)
        drawn = BlockHashKey.draw() if self._header.block_hashes is BlockHashes.PER_FILE else None
        self._hash_key = self._cluster_key if self._header.block_hashes is BlockHashes.CLUSTER else drawn
        self._remove_oldest()

    def _create(self) -> tuple[int, Path]:
        """Create the file of the next part, under a name that no file has."""
        for _ in range(_MAX_TRIES):
            self._part += 1
            path = self._directory / f"{self._stem}-{self._part:06d}.jsonl"
            try:
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE), path
            except FileExistsError:
                continue
        raise OSError(errno.EEXIST, "all names of further files are taken", str(self._directory))

    def _remove_oldest(self) -> None:
        own = sorted(path for path in self._directory.iterdir() if self._own_name.fullmatch(path.name))
        for path in own[: -self._limits.max_files]:
            path.unlink(missing_ok=True)

    def _cut_off(self) -> None:
        """Remove what a failed write has left at the end of the file."""
        assert self._fd is not None
        try:
            os.ftruncate(self._fd, self._size_bytes)
            os.lseek(self._fd, self._size_bytes, os.SEEK_SET)
        except OSError:
            self.close()


def _is_removed(fd: int) -> bool:
    """Whether somebody has removed the open file, so that nobody could read what is written to it."""
    return os.fstat(fd).st_nlink == 0


def _write_all(fd: int, data: bytes) -> None:
    """Write all of data. Raises OSError, and has perhaps written a part of it then."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
