"""A LoRA adapter as requests, engines and ingresses name it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from kv_transfer.message_ranges import MAX_KINDS, Name, Total, WireName, Word


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter with exactly these weights.

    directory: directory of its files, the same on every node
    digest:    hash of the files; an engine that finds files with another hash refuses the adapter
    """

    name: Name
    directory: Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"\A[^\x00]*\Z")]
    digest: Word

    @property
    def key(self) -> str:
        """The adapter's key in the prefix cache and in the batch; other weights under its name have another key."""
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, slots=True)
class AdapterCommands:
    """Commands about adapters, which the workers carry out before the step that brings them, drops first.

    drops: keys of the adapters to drop
    """

    loads: Annotated[tuple[Adapter, ...], Meta(max_length=MAX_KINDS)] = ()
    drops: Annotated[tuple[WireName, ...], Meta(max_length=MAX_KINDS)] = ()


@dataclass(slots=True)
class AdapterStats:
    """The adapters of an engine. Totals count from the engine's start.

    loaded: names of the loaded adapters, the one that was used longest ago first
    """

    loaded: Annotated[list[WireName], Meta(max_length=MAX_KINDS)] = field(default_factory=list)
    num_waiting_reqs: Total = 0
    """Requests that wait until their adapter is loaded."""
    num_loads: Total = 0
    num_failed_loads: Total = 0
    num_evictions: Total = 0
