"""A file of records, each behind its length in four bytes: the calls of a scheduler or of routers, in order."""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from actors.errors import InvalidRecording

logger = logging.getLogger(__name__)

SUFFIX: Final = ".decisions"
MAX_RECORD_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct("<I")
_BUFFER_BYTES: Final = 1 << 20


class RecordingFile:
    """Writes records until the file has its largest size, or the disk refuses one. It never raises once it is open.

    The newest mebibyte is in memory until close(): a process that is killed loses it.
    """

    def __init__(self, directory: Path, name: str, max_bytes: int) -> None:
        """Make the file, which nobody but this user can read. Raises OSError.

        name: who decides; the file's name begins with it, and the time follows
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = directory / f"{name}-{time.time_ns()}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file: BinaryIO | None = os.fdopen(os.open(self.path, flags, 0o600), "wb", _BUFFER_BYTES)
        self._num_left_bytes = max_bytes

    @property
    def is_open(self) -> bool:
        """Whether records are still written."""
        return self._file is not None

    def write(self, record: bytes) -> None:
        """Add a record. The recording ends before one that does not fit."""
        if self._file is None:
            return
        self._num_left_bytes -= len(record) + _LENGTH.size
        if self._num_left_bytes < 0 or len(record) > MAX_RECORD_BYTES:
            logger.info(
                "the recording of decisions has reached its largest size and ends", extra={"path": str(self.path)}
            )
            self.close()
            return
        try:
            self._file.write(_LENGTH.pack(len(record)) + record)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what is in memory, and end the recording. A second call changes nothing."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        logger.warning(
            "the recording of decisions cannot be written and ends",
            extra={"path": str(self.path), "error": str(error)},
        )


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file. A last record that was cut off is left out: its process was killed.

    Raises InvalidRecording.
    """
    try:
        with path.open("rb") as file:
            while len(begin := file.read(_LENGTH.size)) == _LENGTH.size:
                (length,) = _LENGTH.unpack(begin)
                if length > MAX_RECORD_BYTES:
                    raise InvalidRecording(path, f"a record of {length} bytes is longer than {MAX_RECORD_BYTES}")
                if len(record := file.read(length)) < length:
                    return
                yield record
    except OSError as error:
        raise InvalidRecording(path, f"it cannot be read: {error.strerror}") from error
