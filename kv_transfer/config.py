"""The settings of KV transfers."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class StoreConfig(BaseModel):
    """A KV store that an installed package brings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Name of the store's entry point in the group raypd.kv_stores.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the store, as its package documents them."
    )


class KVTransferConfig(BaseModel):
    """How engines send KV blocks to each other, and which stores keep blocks. Times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transport: Literal["auto", "loopback", "nccl", "tcp"] = Field(
        "auto",
        description="auto chooses by device: tcp on the CPU (shared memory within a host), nccl (GPU to GPU, through "
        "cupy) on a GPU.",
    )
    connect_timeout_s: float = Field(
        20.0, gt=0, description="How long the handshake and the first connection of a link may take."
    )
    ready_timeout_s: float = Field(
        120.0, gt=0, description="How long a producer waits for its consumer's READY before it gives the request up."
    )
    handoff_timeout_s: float = Field(
        120.0,
        gt=0,
        description="How long a handoff's load may take at the consumer. After that it is cancelled, and "
        "load_failure_policy decides.",
    )
    chunk_timeout_s: float = Field(
        10.0,
        gt=0,
        description="How long an announced chunk may take to move, and how long a data connection may be without a "
        "sign of the peer's host. After that the link is closed.",
    )
    link_timeout_s: float = Field(
        5.0,
        gt=0,
        description="How long the peer of a link may send nothing; links are checked four times in this time, and a "
        "quiet peer is pinged. After that the link is closed, and opened again on its next use.",
    )
    max_chunk_bytes: int = Field(
        8 * 2**20,
        ge=1,
        description="The transfers of a link take turns, each with a chunk of at most this many bytes, or of one block "
        "if a block is larger.",
    )
    checksum: bool = Field(
        False,
        description="Compare checksums of every chunk after it has been received. Both ends of a link must have the "
        "same setting.",
    )
    max_links: int = Field(
        64,
        ge=1,
        description="Idle links to producers beyond this number are closed, the least recently used first. Links that "
        "other engines have opened are closed by those.",
    )
    load_failure_policy: Literal["recompute", "fail"] = Field(
        "recompute",
        description="The consumer's reaction when a load fails: compute the prompt itself, or fail the request.",
    )
    max_reserved_requests: int = Field(
        64,
        ge=1,
        description="The most requests for which a consumer holds blocks at once while their KV is in transfer.",
    )
    prefix_fetch: bool = Field(
        True,
        description="Fetch a prefix from another engine's cache when that is quicker than computing it, judged by the "
        "times that both have taken so far.",
    )
    cpu_cache_gib: float = Field(
        0.0, ge=0, description="Host memory of each engine, in GiB, for blocks that the KV cache evicts; 0: none."
    )
    stores: tuple[StoreConfig, ...] = Field((), description="Further KV stores, the nearest one first.")
    prefix_load_timeout_s: float = Field(
        10.0,
        gt=0,
        description="How long a request waits for the part of its prefix that a store or another engine has.",
    )
