"""The settings of KV transfers."""

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class StoreConfig(BaseModel):
    """A KV store that an installed package brings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Name of the store's entry point in the group raypd.kv_stores.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options that are passed to the store; its package documents them."
    )


class KVTransferConfig(BaseModel):
    """These settings control how engines send KV blocks to each other, and which stores keep blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transport: Literal["auto", "loopback", "nccl", "tcp"] = Field(
        "auto",
        description="Transport of KV. auto chooses by device: tcp on a CPU (with shared memory within a "
        "host), nccl on a GPU (through cupy). loopback joins engines of one process, for tests.",
    )
    connect_timeout_s: float = Field(
        20.0, gt=0, description="The handshake and the first connection of a link may take this many seconds."
    )
    ready_timeout_s: float = Field(
        120.0,
        gt=0,
        description="A producer waits this many seconds for its consumer's READY; then it gives the request up. The "
        "default is long because the consumer may first have to wait for free blocks.",
    )
    handoff_timeout_s: float = Field(
        120.0,
        gt=0,
        description="A handoff's load may take this many seconds at the consumer. After that it is cancelled, and "
        "load_failure_policy decides. The default is long because this time includes the producer's queue and its "
        "prefill.",
    )
    chunk_timeout_s: float = Field(
        10.0,
        gt=0,
        description="An announced chunk may take this many seconds to move, and a data connection may be this long "
        "without a sign of the peer's host. After that the link is closed.",
    )
    link_timeout_s: float = Field(
        5.0,
        gt=0,
        description="The peer of a link may be silent for this many seconds; links are checked four times in this "
        "time, and a quiet peer is pinged. After that the link is closed, and opened again on its next use.",
    )
    max_chunk_bytes: int = Field(
        8 * 2**20,
        ge=1,
        description="The transfers of a link take turns, each with a chunk of at most this many bytes, or of one "
        "block if a block is larger. With smaller chunks a short transfer waits less for long ones, and there are "
        "more messages.",
    )
    max_send_mib_per_s: float | None = Field(
        None,
        gt=0,
        description="An engine sends at most this many MiB of KV in a second to each other engine, so that others who "
        "use the network are not pushed away. A chunk is delayed by at most a third of chunk_timeout_s. By default "
        "there is no limit.",
    )
    checksum: bool = Field(
        False,
        description="Both ends compare checksums of every chunk after it has been received, which costs CPU time; "
        "by default they do not. Both ends of a link must have the same setting.",
    )
    max_links: int = Field(
        64,
        ge=1,
        description="An engine closes idle links to producers beyond this number, the least recently used first. "
        "Links that other engines have opened are closed by those.",
    )
    load_failure_policy: Literal["recompute", "fail"] = Field(
        "recompute",
        description="Reaction of a consumer to a load that fails. With recompute it computes the prompt itself; "
        "with fail the request fails.",
    )
    max_reserved_requests: int = Field(
        64,
        ge=1,
        description="A consumer holds blocks for at most this many requests at once while their KV is in transfer; "
        "further ones wait.",
    )
    prefix_fetch: bool = Field(
        True,
        description="An engine fetches a prefix from another engine's cache when that is quicker than computing it, "
        "judged by the times that both have taken so far.",
    )
    cpu_cache_gib: float = Field(
        0.0,
        ge=0,
        description="Each engine keeps blocks that the KV cache evicts in this much host memory, in GiB; 0 keeps none.",
    )
    stores: tuple[StoreConfig, ...] = Field((), description="Further KV stores, the nearest one first.")
    prefix_load_timeout_s: float = Field(
        10.0,
        gt=0,
        description="A request waits at most this many seconds for the part of its prefix that a store or another "
        "engine has; then it computes that part itself.",
    )

    @property
    def has_stores(self) -> bool:
        """Whether blocks are kept outside the KV cache, in host memory or in further stores."""
        return bool(self.cpu_cache_gib or self.stores)

    @property
    def max_bytes_per_s(self) -> float:
        """The most bytes that a link sends in a second; infinite if there is no limit."""
        return math.inf if self.max_send_mib_per_s is None else self.max_send_mib_per_s * (1 << 20)
