"""A feature as a row of docs/features.md: how it is asked for, and how its answer is known to be right."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from actors.config import EngineConfig
from cluster.parameters.generation import GenerateChunk, GenerateRequest
from cluster.requests.serving import Serving
from tests.integration.recovering_cluster import RecoveringCluster, collect

CheckpointOf = Callable[[str], Path]


class Scenario(enum.StrEnum):
    """A column."""

    PREFILL_ONLY = "P only"
    DECODE_ONLY = "D only"
    HANDED_OVER = "handed over"
    PREEMPTED = "preempted"
    RESUMED = "resumed after a crash"
    OVERLAPPED = "with overlap"


EVERYWHERE: Final = frozenset(Scenario)


class Feature(Protocol):
    """A row.

    name:        as it stands in the table
    scenarios:   where it can be asked for
    num_streams: of its requests, those that get to position CUT of their output, each on a decode engine
    """

    @property
    def name(self) -> str: ...

    @property
    def scenarios(self) -> frozenset[Scenario]: ...

    @property
    def num_streams(self) -> int: ...

    async def visit(self, serving: Serving) -> None:
        """Ask, and raise AssertionError unless the answer is right."""
        ...


@dataclass(frozen=True, slots=True)
class Generated:
    """A request whose chunks can be judged. check raises AssertionError."""

    name: str
    request: GenerateRequest
    check: Callable[[list[GenerateChunk]], None]
    scenarios: frozenset[Scenario] = EVERYWHERE

    @property
    def num_streams(self) -> int:
        return 1

    async def visit(self, serving: Serving) -> None:
        self.check(await collect(serving, self.request))


@dataclass(frozen=True, slots=True)
class Setup:
    """Features that the same engines serve. The output of what is Generated has more than CUT tokens.

    encoders: engines that encode images, beside those of the scenario
    check: raises AssertionError unless the engines did what this group is about
    """

    config: EngineConfig
    features: Sequence[Feature]
    encoders: tuple[str, ...] = ()
    check: Callable[[RecoveringCluster], None] = lambda cluster: None


@dataclass(frozen=True, slots=True)
class Group:
    """Some rows: features names them. prepare: makes the checkpoint and the expected answers."""

    name: str
    features: tuple[str, ...]
    prepare: Callable[[CheckpointOf], Setup]
