"""Reads the counters of engines and links out of the answer of GetStatus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cluster.api.protos.raypd.v1 import admin_pb2
from cluster.observability.live.engine_totals import EngineTotals, LinkTotals

_CONSUMER: Final = "consumer"


def totals_in(status: admin_pb2.GetStatusResponse, now_s: float) -> Iterator[EngineTotals]:
    """Yield the counters of every engine. now_s: when the answer came, in seconds, on any clock"""
    for engine in status.engines:
        load, has_load = engine.load, engine.HasField("load")
        yield EngineTotals(
            engine.engine_id,
            engine.incarnation,
            engine.role,
            engine.state,
            now_s - engine.age_seconds if has_load else None,
            engine.node,
            engine.last_error,
            load.running,
            load.waiting,
            load.waiting_for_remote_kvs,
            load.held,
            load.blocks,
            load.free_blocks,
            load.preemptions,
            load.prompt_tokens,
            load.output_tokens,
            load.steps,
            tuple(_link(engine.engine_id, link) for link in engine.links),
        )


def _link(engine_id: str, link: admin_pb2.LinkStatus) -> LinkTotals:
    is_consumer = link.end == _CONSUMER
    producer, consumer = (link.peer_engine_id, engine_id) if is_consumer else (engine_id, link.peer_engine_id)
    return LinkTotals(producer, consumer, is_consumer, link.state, link.active_transfers, link.bytes, link.last_error)
