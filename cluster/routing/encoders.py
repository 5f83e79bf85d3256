"""Chooses the engine that encodes a request's images."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from actors.core.requests.request import EngineCoreRequest
from cluster.routing.base import EngineLoad
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.pairing import find_refusal
from kv_transfer.params import EngineAddress


def choose_encoder(
    request: EngineCoreRequest, engines: Iterable[EngineLoad], asker: EngineDescriptor
) -> EngineAddress | None:
    """Choose an encode engine by the hash of the request's first image. Returns None if no encode engine can serve.

    asker: the engine that prefills; it fetches the embeddings over a link, so only engines that can link to it count

    The same image goes to the same engine, which may still have the embeddings. The choice is by rendezvous hashing, so
    that most images keep their engine when engines come or go.
    """
    name = request.mm_features[0].mm_hash
    encoders = [
        engine.descriptor
        for engine in engines
        if engine.descriptor.role is EngineRole.ENCODE and find_refusal(engine.descriptor, asker) is None
    ]
    chosen = max(
        encoders, key=lambda engine: xxhash.xxh3_64_intdigest(f"{name} {engine.engine_id}".encode()), default=None
    )
    return None if chosen is None else chosen.kv_address
