"""Names in words what holds requests back: a queue for prefill, blocks or slots of decode engines, a link, or nothing.

The rule counts the requests that each cause has held back for the last seconds, and names the cause with the most:
- decode blocks: requests that wait at engines that decode, and whose KV cache is full of requests that decode. If it is
  full of requests whose KV has not come yet, what delays their KV is the cause, and not the cache;
- prefill queue: requests that wait at engines that prefill. A prefill engine begins once the decode engine has reserved
  blocks: those that wait for the decode engine wait at the prefill engine as well, and are counted for it alone;
- link: requests whose prefill is over and whose KV has not left the prefill engine, and those that wait because such
  requests fill the prefill engine's KV cache;
- decode slots: requests that wait at decode engines whose KV cache has room.
That no engine decodes comes before all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.observability.live.live_rates import LiveCluster, LiveEngine, LiveLink

FULL: Final = 0.95
"""A KV cache of which requests hold this share of the blocks is full: a further prompt rarely fits."""
_NEARLY_FULL: Final = 0.8
"""From this share on, a KV cache is full as well if it has no room for one more request like those that run in it."""
_MAX_NAMED: Final = 3
_SERVING: Final = ("ready", "connected")


class BottleneckKind(enum.Enum):
    """The causes for which requests wait."""

    NO_ENGINE = "no engine"
    PREFILL_QUEUE = "prefill queue"
    DECODE_BLOCKS = "decode blocks"
    DECODE_SLOTS = "decode slots"
    LINK = "link"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The cause that holds requests back now.

    num_requests: how many it holds back
    where:        the engines concerned; of a link its producer and its consumer
    text:         a sentence for people
    """

    kind: BottleneckKind
    num_requests: int = 0
    where: tuple[str, ...] = ()
    text: str = "Nothing holds requests back."


def find_bottleneck(live: LiveCluster) -> Bottleneck:
    """Return the cause that holds the most requests back."""
    serving = [engine for engine in live.engines if engine.state in _SERVING]
    if missing := _missing(serving):
        return missing
    decoding = [one for one in serving if one.serves_decode and one.num_lasting_waiting]
    full = [one for one in decoding if _is_full(one) and one.num_running >= one.num_waiting_for_kv]
    slots = [one for one in decoding if not _is_full(one) and not one.serves_prefill]
    prefilling = [one for one in serving if one.serves_prefill and one.num_lasting_waiting and one not in full]
    unsent = [one for one in prefilling if one.kv_used >= FULL and one.num_held > one.num_running]
    queue = [one for one in prefilling if one not in unsent]
    num_blocks, num_slots = _sum(full), _sum(slots)
    num_link = sum(one.num_lasting_held for one in serving) + _sum(unsent)
    num_queue = max(0, _sum(queue) - sum(one.num_lasting_waiting for one in (*full, *slots) if one.role == "decode"))
    # Where two causes hold back as many, the first one is named: blocks that are missing make the other queues grow.
    causes: list[tuple[int, Callable[[], Bottleneck]]] = [
        (num_blocks, lambda: _decode_blocks(full)),
        (num_queue, lambda: _prefill_queue(queue, num_queue)),
        (num_link, lambda: _link(live.links, num_link)),
        (num_slots, lambda: _decode_slots(slots)),
    ]
    num_requests, describe = max(causes, key=lambda cause: cause[0])
    return describe() if num_requests else Bottleneck(BottleneckKind.NOTHING)


def _is_full(engine: LiveEngine) -> bool:
    """Whether the KV cache has no room for a further request, as far as the shares of those that run tell."""
    used, free, num = engine.kv_used, 1.0 - engine.kv_used, engine.num_running
    return used >= FULL or (num > 0 and used >= _NEARLY_FULL and free * num < used)


def _missing(serving: Sequence[LiveEngine]) -> Bottleneck | None:
    if not serving:
        return Bottleneck(BottleneckKind.NO_ENGINE, text="No engine serves: requests wait or are refused.")
    if not any(one.serves_decode for one in serving):
        return Bottleneck(BottleneckKind.NO_ENGINE, text="No decode engine serves: requests wait or are refused.")
    return None


def _prefill_queue(engines: Sequence[LiveEngine], num: int) -> Bottleneck:
    names = _names(engines)
    text = f"Prefill queue: {_requests(num)} for prefill at {names}. More prefill engines would shorten the queue."
    return Bottleneck(BottleneckKind.PREFILL_QUEUE, num, _ids(engines), text)


def _decode_blocks(engines: Sequence[LiveEngine]) -> Bottleneck:
    num, fullest = _sum(engines), max(engine.kv_used for engine in engines)
    text = (
        f"Decode blocks: {_requests(num)} for KV blocks at {_names(engines)}, whose KV cache is {fullest:.0%} full. "
        "More decode engines, or a larger KV cache, would make room."
    )
    return Bottleneck(BottleneckKind.DECODE_BLOCKS, num, _ids(engines), text)


def _decode_slots(engines: Sequence[LiveEngine]) -> Bottleneck:
    num = _sum(engines)
    text = (
        f"Decode slots: {_requests(num)} at {_names(engines)}, whose KV cache has room: their batch or their step's "
        "tokens are at the limit."
    )
    return Bottleneck(BottleneckKind.DECODE_SLOTS, num, _ids(engines), text)


def _link(links: Sequence[LiveLink], num_requests: int) -> Bottleneck:
    busiest = max(links, key=lambda link: link.num_active_transfers, default=None)
    if busiest is None:
        text = f"Link: {_requests(num_requests)} for the transfer of their KV, and no link is open."
        return Bottleneck(BottleneckKind.LINK, num_requests, (), text)
    speed = "" if busiest.bytes_per_s is None else f" at {gb_per_s(busiest.bytes_per_s)}"
    text = (
        f"Link: {_requests(num_requests)} for the transfer of their KV after prefill. The link with the most "
        f"transfers, {busiest.producer_id} to {busiest.consumer_id}, has {busiest.num_active_transfers}{speed}."
    )
    return Bottleneck(BottleneckKind.LINK, num_requests, (busiest.producer_id, busiest.consumer_id), text)


def gb_per_s(bytes_per_s: float) -> str:
    """Return a rate in GB/s (10^9 bytes per second), or in MB/s below 0.1 GB/s."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _requests(num: int) -> str:
    return "1 request waits" if num == 1 else f"{num} requests wait"


def _sum(engines: Sequence[LiveEngine]) -> int:
    return sum(engine.num_lasting_waiting for engine in engines)


def _ids(engines: Sequence[LiveEngine]) -> tuple[str, ...]:
    return tuple(engine.engine_id for engine in sorted(engines, key=lambda one: -one.num_lasting_waiting))


def _names(engines: Sequence[LiveEngine]) -> str:
    ids = _ids(engines)
    rest = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
    return ", ".join(ids[:_MAX_NAMED]) + rest
