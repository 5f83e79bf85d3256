"""The settings of this floor."""

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
    """How engines hand KV blocks to each other. Times are in seconds."""

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
        120.0, gt=0, description="How long a request may stay in WAITING_FOR_REMOTE_KVS before the recovery policy."
    )
    chunk_timeout_s: float = Field(
        10.0,
        gt=0,
        description="How long an announced chunk may take, and a data connection be without a sign of the peer's host; "
        "past it the link is closed.",
    )
    link_timeout_s: float = Field(
        5.0,
        gt=0,
        description="How long the peer of a link may say nothing; it is asked four times as often. Past it the link is "
        "closed, and rebuilt on its next use.",
    )
    max_chunk_bytes: int = Field(
        8 * 2**20,
        ge=1,
        description="Transfers of a link take turns, each with a chunk of no more bytes than this, or of one block.",
    )
    checksum: bool = Field(
        False, description="Check every chunk after it has travelled; both ends of a link must have the same."
    )
    max_links: int = Field(
        64,
        ge=1,
        description="Idle links to producers beyond so many are closed, least recently used first. Links that others "
        "have dialled are theirs to close.",
    )
    load_failure_policy: Literal["recompute", "fail"] = Field(
        "recompute", description="Policy of a consumer when a load fails: prefill locally, or fail the request."
    )
    max_reserved_requests: int = Field(
        64, ge=1, description="How many requests a consumer holds blocks for at once while they are in transfer."
    )
    prefix_fetch: bool = Field(
        True,
        description="Fetch a prefix from another engine's cache where that is quicker than to compute it, by what both "
        "have taken so far.",
    )
    cpu_cache_gib: float = Field(
        0.0, ge=0, description="Host memory, per engine, for blocks that the KV cache evicts; 0: none."
    )
    stores: tuple[StoreConfig, ...] = Field((), description="Further KV stores, the nearest one first.")
    prefix_load_timeout_s: float = Field(
        10.0, gt=0, description="How long a request waits for the part of its prefix that is elsewhere."
    )
