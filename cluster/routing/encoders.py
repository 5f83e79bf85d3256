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
    """Choose by the first image's name, so that who shows it again finds it encoded; None if no engine only encodes.

    asker: the engine that prefills; embeddings come to it by a link, so only engines that can have one are asked
    By the largest weight (rendezvous hashing): when engines come or go, most images stay where they are.
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
