"""Turns counters that grow into rates, by the differences over the last few seconds.

An engine's samples belong to one incarnation: a new one counts from 0, so its rates begin anew. A sample is used once,
however often it is read, because engines report less often than viewers may ask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from cluster.observability.live.engine_totals import EngineTotals, LinkTotals

_WINDOW_S: Final = 2.0
"""Rates are means over this time, or over two samples if these are further apart."""
_SAME_SAMPLE_S: Final = 0.05
"""Samples whose times differ less are the same one: times that come as ages differ by the delay of the answer."""


class LiveLink(msgspec.Struct, frozen=True):
    """A link from a prefill engine to a decode engine. bytes_per_s: None before the second sample"""

    producer_id: str
    consumer_id: str
    state: str
    num_active_transfers: int
    bytes_per_s: float | None = None
    last_error: str = ""


class LiveEngine(msgspec.Struct, frozen=True):
    """An engine now.

    has_stats: whether the engine has sent counters; without them all numbers are 0
    kv_used:   the share of the KV cache's blocks that requests hold, 0 to 1
    *_per_s:   mean rates of the last seconds; None before the second sample
    step_s:    the mean time from one step to the next, while the engine stepped; None if it did not
    num_lasting_waiting, num_lasting_held: the least of num_waiting and num_held in all samples of the last seconds: a
               queue that lasts, unlike requests that are passed on at once
    """

    engine_id: str
    incarnation: int
    role: str
    state: str
    node: str = ""
    last_error: str = ""
    has_stats: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_kv: int = 0
    num_held: int = 0
    num_blocks: int = 0
    kv_used: float = 0.0
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    preemptions_per_s: float | None = None
    step_s: float | None = None
    num_lasting_waiting: int = 0
    num_lasting_held: int = 0

    @property
    def serves_prefill(self) -> bool:
        """Whether the engine's role is to compute prompts."""
        return self.role in ("prefill", "both")

    @property
    def serves_decode(self) -> bool:
        """Whether the engine's role is to generate output."""
        return self.role in ("decode", "both")


class LiveCluster(msgspec.Struct, frozen=True):
    """The engines and links of a cluster now."""

    engines: tuple[LiveEngine, ...] = ()
    links: tuple[LiveLink, ...] = ()


class LiveRates:
    """Keeps the last samples of each engine, and makes rates of them."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], deque[EngineTotals]] = {}

    def update(self, engines: Iterable[EngineTotals]) -> LiveCluster:
        """Take newer counters of all engines, and return what they say. Engines that are left out are forgotten."""
        newest = {(one.engine_id, one.incarnation): one for one in engines}
        self._samples = {key: samples for key, samples in self._samples.items() if key in newest}
        for key, totals in newest.items():
            if totals.at_s is not None:
                _add(self._samples.setdefault(key, deque()), totals)
        live = [_engine(totals, self._samples.get(key)) for key, totals in newest.items()]
        return LiveCluster(tuple(live), tuple(self._links()))

    def _links(self) -> list[LiveLink]:
        """Return every link once, as its consumer reports it, or else its producer."""
        found: dict[tuple[str, str], LiveLink] = {}
        counted_by_consumer: set[tuple[str, str]] = set()
        for samples in self._samples.values():
            before = {(one.producer_id, one.consumer_id): one for one in samples[0].links}
            span_s = _span_s(samples)
            for link in samples[-1].links:
                key = link.producer_id, link.consumer_id
                if key in counted_by_consumer and not link.is_of_consumer:
                    continue
                if link.is_of_consumer:
                    counted_by_consumer.add(key)
                found[key] = _link(link, before.get(key), span_s)
        return [found[key] for key in sorted(found)]


def _add(samples: deque[EngineTotals], totals: EngineTotals) -> None:
    assert totals.at_s is not None
    if samples:
        newest_s = samples[-1].at_s
        assert newest_s is not None
        if totals.num_steps < samples[-1].num_steps or totals.num_output_tokens < samples[-1].num_output_tokens:
            samples.clear()
        elif totals.at_s - newest_s < _SAME_SAMPLE_S:
            return
    samples.append(totals)
    while len(samples) > 2 and totals.at_s - (samples[1].at_s or 0.0) >= _WINDOW_S:
        samples.popleft()


def _span_s(samples: deque[EngineTotals]) -> float:
    return (samples[-1].at_s or 0.0) - (samples[0].at_s or 0.0)


def _engine(totals: EngineTotals, samples: deque[EngineTotals] | None) -> LiveEngine:
    head = (totals.engine_id, totals.incarnation, totals.role, totals.state, totals.node, totals.last_error)
    if not samples:
        return LiveEngine(*head)
    first, span_s = samples[0], _span_s(samples)

    def rate(now: int, before: int) -> float | None:
        return (now - before) / span_s if span_s > 0 else None

    num_steps = samples[-1].num_steps - first.num_steps
    return LiveEngine(
        *head,
        has_stats=True,
        num_running=totals.num_running,
        num_waiting=totals.num_waiting,
        num_waiting_for_kv=totals.num_waiting_for_kv,
        num_held=totals.num_held,
        num_blocks=totals.num_blocks,
        kv_used=(totals.num_blocks - totals.num_free_blocks) / totals.num_blocks if totals.num_blocks else 0.0,
        prompt_tokens_per_s=rate(samples[-1].num_prompt_tokens, first.num_prompt_tokens),
        output_tokens_per_s=rate(samples[-1].num_output_tokens, first.num_output_tokens),
        preemptions_per_s=rate(samples[-1].num_preemptions, first.num_preemptions),
        step_s=span_s / num_steps if num_steps > 0 else None,
        num_lasting_waiting=min(one.num_waiting for one in samples),
        num_lasting_held=min(one.num_held for one in samples),
    )


def _link(link: LinkTotals, before: LinkTotals | None, span_s: float) -> LiveLink:
    has_rate = before is not None and span_s > 0 and link.num_bytes >= before.num_bytes
    bytes_per_s = (link.num_bytes - before.num_bytes) / span_s if has_rate and before is not None else None
    return LiveLink(
        link.producer_id, link.consumer_id, link.state, link.num_active_transfers, bytes_per_s, link.last_error
    )
