"""Engines and links for tests of live figures."""

from __future__ import annotations

from cluster.observability.live.engine_totals import EngineTotals, LinkTotals


def totals(
    engine_id: str,
    at_s: float | None = 0.0,
    *,
    incarnation: int = 1,
    links: tuple[LinkTotals, ...] = (),
    **numbers: int,
) -> EngineTotals:
    """The counters of an engine of 100 blocks, whose role is in its id. numbers: such as waiting=3, tokens=100"""
    return EngineTotals(
        engine_id,
        incarnation,
        engine_id.split("-")[0],
        "ready",
        at_s,
        num_running=numbers.get("running", 0),
        num_waiting=numbers.get("waiting", 0),
        num_waiting_for_kv=numbers.get("for_kv", 0),
        num_held=numbers.get("held", 0),
        num_blocks=100,
        num_free_blocks=numbers.get("free", 50),
        num_output_tokens=numbers.get("tokens", 0),
        num_steps=numbers.get("steps", 0),
        links=links,
    )


def link(num_bytes: int, *, is_of_consumer: bool = True, active: int = 0) -> LinkTotals:
    """The link from prefill-0 to decode-0."""
    return LinkTotals("prefill-0", "decode-0", is_of_consumer, "open", active, num_bytes)
