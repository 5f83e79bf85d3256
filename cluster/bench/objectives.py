"""Objectives for single requests, and how many requests met them: goodput."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cluster.bench.record import RequestRecord
from cluster.errors import InvalidConfig

_PAIR: Final = re.compile(r"(?P<name>[a-z0-9]+)\s*[:=]\s*(?P<number>[0-9]*\.?[0-9]+)\s*(?P<unit>ms|s|)")
_NAMES: Final = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2el", "e2e": "e2el"}
GOODPUT_SAID: Final = (
    "Goodput: complete requests that met every objective, per second. ttft, tpot and e2el are held against the "
    "request's own figure (tpot of a single token is 0), itl against the longest time between two of its events."
)


def parse_objectives(texts: Iterable[str]) -> dict[str, float]:
    """Parse objectives such as "ttft=500ms,itl=0.05s", or "ttft:500" as vLLM writes them: seconds by metric.

    A number without a unit is in milliseconds. Raises InvalidConfig.
    """
    objectives: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.replace(",", " ").split()):
        found = _PAIR.fullmatch(part.lower())
        if found is None or found["name"] not in _NAMES:
            mistake = f"{part!r} is not ttft, tpot, itl or e2el with a time, such as ttft=500ms"
            raise InvalidConfig("--slo", [mistake])
        name = _NAMES[found["name"]]
        if name in objectives:
            raise InvalidConfig("--slo", [f"{name} is given twice"])
        objectives[name] = float(found["number"]) / (1 if found["unit"] == "s" else 1000)
    return objectives


def meets(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether a request is complete and met all objectives; a figure equal to its objective meets the objective."""
    return record.is_complete and all(_figure(record, name) <= limit_s for name, limit_s in objectives.items())


def num_good(records: Sequence[RequestRecord], objectives: Mapping[str, float]) -> int:
    """Return how many requests met all objectives."""
    return sum(meets(record, objectives) for record in records)


def _figure(record: RequestRecord, name: str) -> float:
    figures = {"ttft": record.ttft_s, "itl": record.longest_gap_s, "e2el": record.e2e_s}
    return figures.get(name, record.tpot_s or 0.0)
