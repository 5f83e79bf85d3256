"""Keeps the records of the last requests of one ingress, bounded in number and in bytes.

Records are kept as bytes: so their size is known exactly, and the garbage collector has no objects of theirs to visit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from cluster.routing.request_record import RequestRecord

_OVERHEAD_BYTES: Final = 300
"""The memory that a record takes beside its bytes and its names, rounded up."""

_Key: TypeAlias = tuple[str, str]
_Numbered: TypeAlias = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """The record of a request that has ended.

    number: of the record, in the order of the ends; the first one has 1
    data:   RequestRecord.to_bytes()
    """

    number: int
    tenant: str
    request_id: str
    data: bytes


class RecordStore:
    """The records by tenant and request id. A request that reuses an id replaces the record of the earlier one."""

    def __init__(self, max_records: int, max_bytes: int) -> None:
        """Keep nothing yet. max_records: 0 keeps no record at all"""
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._kept: OrderedDict[_Key, _Numbered] = OrderedDict()
        self._num_put = 0
        self.size_bytes = 0
        """The memory of all records, about; never above max_bytes."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_off(self) -> bool:
        """Whether no record is ever kept."""
        return self._max_records == 0

    def put(self, record: RequestRecord) -> None:
        """Keep a record; the oldest ones make room for it."""
        if self.is_off:
            return
        key = record.tenant, record.request_id
        self._drop(key, self._kept.pop(key, None))
        self._num_put += 1
        numbered = self._kept[key] = self._num_put, record.to_bytes()
        self.size_bytes += _size_bytes(key, numbered)
        while len(self._kept) > self._max_records or self.size_bytes > self._max_bytes:
            self._drop(*self._kept.popitem(last=False))

    def _drop(self, key: _Key, numbered: _Numbered | None) -> None:
        if numbered is not None:
            self.size_bytes -= _size_bytes(key, numbered)

    def items(self) -> Iterator[KeptRecord]:
        """Yield the record of every request, the oldest first."""
        return (KeptRecord(number, *key, data) for key, (number, data) in self._kept.items())

    def newest(self) -> Iterator[KeptRecord]:
        """Yield the record of every request, the newest first."""
        return (KeptRecord(number, *key, data) for key, (number, data) in reversed(self._kept.items()))


def _size_bytes(key: _Key, numbered: _Numbered) -> int:
    return len(numbered[1]) + len(key[0]) + len(key[1]) + _OVERHEAD_BYTES
