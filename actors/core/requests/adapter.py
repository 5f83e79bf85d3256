"""A LoRA adapter as requests, engines and doors name it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from kv_transfer.message_ranges import MAX_KINDS, Name, Total, WireName, Word


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter with these very weights.

    directory: where its files are, the same on every node
    digest:    of the files; an engine that finds others there refuses
    """

    name: Name
    directory: Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"\A[^\x00]*\Z")]
    digest: Word

    @property
    def key(self) -> str:
        """Names it in the prefix cache and in the batch: other weights under the same name have another key."""
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, slots=True)
class AdapterCommands:
    """What the workers are to do about adapters, before the step that carries this. drops: by key, these first."""

    loads: Annotated[tuple[Adapter, ...], Meta(max_length=MAX_KINDS)] = ()
    drops: Annotated[tuple[WireName, ...], Meta(max_length=MAX_KINDS)] = ()


@dataclass(slots=True)
class AdapterStats:
    """What an engine has of adapters. Totals run since its start.

    loaded: their names, the one that was used longest ago first
    """

    loaded: Annotated[list[WireName], Meta(max_length=MAX_KINDS)] = field(default_factory=list)
    num_waiting_reqs: Total = 0
    """Requests that wait until theirs is loaded."""
    num_loads: Total = 0
    num_failed_loads: Total = 0
    num_evictions: Total = 0
