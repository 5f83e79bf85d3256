"""The counters of engines and links that live figures are made of, whichever way they came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cluster.observability.status import EngineView
from kv_transfer.params import TransferRole
from kv_transfer.transfer_stats import LinkStats


@dataclass(frozen=True, slots=True)
class LinkTotals:
    """The counters of one link, as one of its ends sees it.

    producer_id, consumer_id: the engines that send and receive KV
    is_of_consumer: whether the consumer counted; both ends of a link report it
    num_bytes: the bytes that were moved since the link was made
    """

    producer_id: str
    consumer_id: str
    is_of_consumer: bool
    state: str
    num_active_transfers: int
    num_bytes: int
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """The counters of one engine at one moment. Those of preemptions, tokens and steps count since its start.

    at_s: when the counters were taken, in seconds, on any clock; None if the engine has sent none yet
    num_held: finished requests whose blocks a transfer still holds
    """

    engine_id: str
    incarnation: int
    role: str
    state: str
    at_s: float | None = None
    node: str = ""
    last_error: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_kv: int = 0
    num_held: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_steps: int = 0
    links: tuple[LinkTotals, ...] = ()


def totals_of(engines: Iterable[EngineView]) -> Iterator[EngineTotals]:
    """Yield the counters of a cluster's engines; their times are Unix times."""
    for engine in engines:
        stats = engine.stats
        if stats is None:
            yield EngineTotals(
                engine.engine_id,
                engine.incarnation,
                engine.role,
                engine.state,
                node=engine.node,
                last_error=engine.last_error,
            )
            continue
        links = () if stats.transfer_stats is None else stats.transfer_stats.links
        yield EngineTotals(
            engine.engine_id,
            engine.incarnation,
            engine.role,
            engine.state,
            engine.stats_at_s,
            engine.node,
            engine.last_error,
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            stats.num_waiting_for_remote_kvs,
            stats.num_held_reqs,
            stats.num_blocks,
            stats.num_free_blocks,
            stats.num_preemptions,
            stats.num_prompt_tokens_computed,
            stats.num_output_tokens,
            stats.num_steps,
            tuple(_link(engine.engine_id, link) for link in links),
        )


def _link(engine_id: str, link: LinkStats) -> LinkTotals:
    is_consumer = link.role is TransferRole.CONSUMER
    producer, consumer = (link.peer_engine_id, engine_id) if is_consumer else (engine_id, link.peer_engine_id)
    return LinkTotals(
        producer,
        consumer,
        is_consumer,
        link.state.name.lower(),
        link.num_active_transfers,
        link.num_bytes,
        link.last_error,
    )
