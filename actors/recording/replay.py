"""Replays the records of a recording one by one, up to its end or to the first decision that differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from actors.errors import InvalidRecording
from actors.ranks.rank_codec import RankCodec
from actors.recording.engine_events import Unrecorded
from actors.recording.recording_file import read_records
from kv_transfer.message_ranges import MALFORMED


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that was not the recorded one. record: its number in the file, from 1"""

    record: int
    what: str


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay.

    who:            the engine or the ingress, with its incarnation
    num_decisions:  decisions that were compared: steps and what clients got of them, or routes
    counts:         numbers of the recorded calls, by the calls' names
    difference:     None: all decisions were the recorded ones
    ends_early:     why the recording ends before its process did; None: no record says so
    """

    who: str
    num_decisions: int
    counts: dict[str, int]
    difference: Difference | None = None
    ends_early: str | None = None


class DecisionDiffers(Exception):
    """A replayed decision is not the recorded one; the message says what differs."""


class RecordingHeader(Protocol):
    """The first record of a recording."""

    @property
    def version(self) -> int:
        """The number of the recording's format."""


class Replayed(Protocol):
    """A scheduler, or the routers of an ingress, that gets the calls that the records have."""

    def take(self, event: object) -> bool:
        """Make the call that a record is of. Returns whether a decision was compared.

        Raises DecisionDiffers; KeyError or ValueError for a call that the calls before it make impossible.
        """


HeaderT = TypeVar("HeaderT", bound=RecordingHeader)


class Recording(Generic[HeaderT]):
    """The records of one file, read once: read_header(), then replay()."""

    def __init__(self, path: Path, codec: RankCodec, recorder: str) -> None:
        """recorder: what has made the recording, for messages: "an engine" or "an ingress" """
        self._path = path
        self._codec = codec
        self._recorder = recorder
        self._records = enumerate(read_records(path), start=1)

    def read_header(self, kind: type[HeaderT], version: int) -> HeaderT:
        """Return the first record. Raises InvalidRecording unless it is a header of this kind and version."""
        header = self._decode(*next(self._records, (1, b"")))
        if not isinstance(header, kind):
            raise InvalidRecording(self._path, f"it does not begin with the header of {self._recorder}")
        if header.version != version:
            raise InvalidRecording(
                self._path, f"it has version {header.version}, and this raypd reads version {version}"
            )
        return header

    def replay(self, who: str, replayed: Replayed) -> Replay:
        """Replay the records after the header. Raises InvalidRecording."""
        num_decisions = 0
        counts = dict.fromkeys((kind.__name__ for kind in self._codec.types[1:] if kind is not Unrecorded), 0)
        for number, event in self._events():
            if isinstance(event, Unrecorded):
                return Replay(who, num_decisions, counts, ends_early=event.reason)
            try:
                counts[type(event).__name__] += 1
                num_decisions += replayed.take(event)
            except DecisionDiffers as error:
                return Replay(who, num_decisions, counts, Difference(number, str(error)))
            except (KeyError, ValueError) as error:
                raise InvalidRecording(self._path, f"record {number} is not possible here: {error!r}") from error
        return Replay(who, num_decisions, counts)

    def _events(self) -> Iterator[tuple[int, object]]:
        for number, record in self._records:
            yield number, self._decode(number, record)

    def _decode(self, number: int, record: bytes) -> object:
        try:
            return self._codec.decode(record)
        except MALFORMED as error:
            raise InvalidRecording(self._path, f"record {number} is no record of {self._recorder}: {error}") from error
