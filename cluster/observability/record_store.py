"""Keeps the records of the last requests of one ingress, bounded in number and in bytes.

Records are kept as bytes: so their size is known exactly, and the garbage collector has no objects of theirs to visit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, TypeAlias

from cluster.routing.request_record import RequestRecord

_OVERHEAD_BYTES: Final = 300
"""The memory that a record takes beside its bytes and its names, rounded up."""

_Key: TypeAlias = tuple[str, str]


class RecordStore:
    """The records by tenant and request id. A request that reuses an id replaces the record of the earlier one."""

    def __init__(self, max_records: int, max_bytes: int) -> None:
        """Keep nothing yet. max_records: 0 keeps no record at all"""
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._kept: OrderedDict[_Key, bytes] = OrderedDict()
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
        data = self._kept[key] = record.to_bytes()
        self.size_bytes += _size_bytes(key, data)
        while len(self._kept) > self._max_records or self.size_bytes > self._max_bytes:
            self._drop(*self._kept.popitem(last=False))

    def _drop(self, key: _Key, data: bytes | None) -> None:
        if data is not None:
            self.size_bytes -= _size_bytes(key, data)

    def items(self) -> Iterator[tuple[str, str, bytes]]:
        """Yield the tenant, the request id and the record of every request, the oldest first."""
        for (tenant, request_id), data in self._kept.items():
            yield tenant, request_id, data


def _size_bytes(key: _Key, data: bytes) -> int:
    return len(data) + len(key[0]) + len(key[1]) + _OVERHEAD_BYTES
