"""Declares the resources of an engine's ranks; imports neither torch nor ray, for modules that only count resources."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RankResources:
    """The resources that each rank of an engine reserves, in the one bundle of the engine's placement group."""

    num_cpus: float = 1
    num_gpus: float = 0
    custom: dict[str, float] = field(default_factory=dict)
