"""Decides from engines' descriptors which engines can exchange KV; the handshake of a link follows the same rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from kv_transfer.links.link_compatibility import find_mismatch


@dataclass(frozen=True, slots=True)
class RefusedPair:
    """Two engines that cannot work together, by their ids, and the reason.

    The two are a prefill and a decode engine that cannot hand over, or an encode and a prefill engine that cannot
    exchange embeddings; the field `prefill` then names the encode engine, and `decode` the prefill engine.
    """

    prefill: str
    decode: str
    reason: str


def find_refusal(one: EngineDescriptor, other: EngineDescriptor) -> str | None:
    """Return why two engines cannot exchange KV, in either direction; None if they can, or if that is not known."""
    if one.model_version != other.model_version:
        return f"model version: {one.model_version} at {one.engine_id}, {other.model_version} at {other.engine_id}"
    if one.pairing is None or other.pairing is None:
        return None
    return find_mismatch(one.pairing, other.pairing, one.engine_id, other.engine_id)


def refused_pairs(engines: Iterable[EngineDescriptor]) -> tuple[RefusedPair, ...]:
    """Return all pairs of engines that have the roles of a pair but cannot work together."""
    members = sorted(engines, key=lambda engine: engine.key)
    return tuple(
        RefusedPair(producer.engine_id, consumer.engine_id, reason)
        for roles in ((EngineRole.PREFILL, EngineRole.DECODE), (EngineRole.ENCODE, EngineRole.PREFILL))
        for producer in members
        if producer.role is roles[0]
        for consumer in members
        if consumer.role is roles[1] and (reason := find_refusal(producer, consumer)) is not None
    )
