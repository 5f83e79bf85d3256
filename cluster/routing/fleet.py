"""Keeps the engines of one snapshot in arrays, so that those worth comparing are found among a thousand quickly.

The engines are grouped by the facts that decide whether two of them can exchange KV; all pairs of two groups can, or
none can. For each use, computing prompts, decoding, or both, an array has the cost of a usual request at each engine of
a group, without the wait in its queue. The arrays change as the load book does, an engine at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, Generic

import numpy as np
import numpy.typing as npt

from cluster.routing.base import EngineT
from cluster.routing.costs.request_facts import RequestFacts
from cluster.routing.costs.role_memory import RoleMemory
from cluster.routing.costs.route_cost import usual_costs
from cluster.routing.costs.steady_load import choose_role_use
from cluster.routing.decision import RoleChoice
from cluster.routing.engine_connection import EngineKey, EngineRole
from cluster.routing.load_book import LoadBook
from cluster.routing.pairing import find_refusal
from cluster.routing.reported_work import EngineWork

NUM_CANDIDATES: Final = 2
"""The engines compared for each use, besides those that have the prefix: the cheapest one, and others drawn."""


_CHOICE_LASTS_S: Final = 0.5
"""How much roles count is looked at as often as engines report."""
_MAX_AIMS: Final = 16
"""The different aims for which it is looked at; to others, roles are weighed."""
_TINY: Final = 1e-6 / (1 << 31)


class Use(IntEnum):
    """The part of a request that an engine is to do."""

    PROMPT = 0
    DECODE = 1
    ALONE = 2


class EngineGroup(Generic[EngineT]):
    """The engines that can exchange KV with the same engines."""

    def __init__(self, engines: Sequence[EngineT], works: Sequence[EngineWork]) -> None:
        """Take the engines and their works, in the same order."""
        self.engines, self.works = list(engines), list(works)
        self.consumers: list[EngineGroup[EngineT]] = []
        """The groups that this one can hand over to; itself, too."""
        self._queue_end_s = np.zeros(len(engines))
        self._rest_s: npt.NDArray[np.float64] = np.full((len(Use), len(engines)), np.inf)
        self._draw = len(engines)
        roles = [engine.descriptor.role for engine in engines]
        self.members: list[list[int]] = [
            [index for index, role in enumerate(roles) if role.computes_prompts],
            [index for index, role in enumerate(roles) if role.generates],
            list(range(len(engines))),
        ]
        """For each use the numbers of the engines that are for it."""
        self._are_few = max(map(len, self.members)) <= NUM_CANDIDATES
        self.is_for = [
            [role.computes_prompts for role in roles],
            [role.generates for role in roles],
            [True] * len(roles),
        ]
        self.are_both = [role is EngineRole.BOTH for role in roles]
        self.prefer_prompts = [role is EngineRole.PREFILL for role in roles]
        self.ranks = [engine.descriptor.handoff_rank for engine in engines]

    def update(self, index: int, usual: RequestFacts) -> None:
        """Compute the costs of a usual request at an engine again. usual: the request"""
        work = self.works[index]
        assert work.prediction is not None, "engines without predictions are not compared by cost"
        self._queue_end_s[index] = work.queue_end_s
        prompt_s, decode_s = usual_costs(usual, work, work.prediction)
        # Of engines that cost the same, each is the cheapest one for a while: the next change of its work draws again.
        self._draw = (self._draw * 1103515245 + 12345) % (1 << 31)
        alike = 1 + _TINY * self._draw
        self._rest_s[Use.ALONE, index] = (prompt_s + decode_s) * alike
        self._rest_s[Use.PROMPT, index] = prompt_s * alike if self.is_for[Use.PROMPT][index] else np.inf
        self._rest_s[Use.DECODE, index] = decode_s * alike if self.is_for[Use.DECODE][index] else np.inf

    def candidates(self, now_s: float, draw: int) -> list[list[int]]:
        """Return, for each use, the numbers of the engines to compare: the cheapest one, and drawn ones.

        draw: a random number
        """
        if self._are_few:
            return [list(members) for members in self.members]
        cheapest = (np.maximum(self._queue_end_s, now_s) + self._rest_s).argmin(axis=1).tolist()
        found: list[list[int]] = []
        for members, first in zip(self.members, cheapest, strict=True):
            chosen = [first] if members else []
            for number in range(1, NUM_CANDIDATES if members else 0):
                drawn = members[(draw >> (16 * number)) % len(members)]
                if drawn not in chosen:
                    chosen.append(drawn)
            found.append(chosen)
        return found


class Fleet(Generic[EngineT]):
    """The engines of one snapshot."""

    def __init__(self, engines: Sequence[EngineT], book: LoadBook, usual: RequestFacts) -> None:
        """Group the engines. Those of role `encode` are left out.

        usual: a request of the usual size, at whose cost engines are compared before any is looked at closely
        """
        self.usual = usual
        self._book = book
        self._role_choices: dict[tuple[float, float | None], RoleChoice] = {}
        self._choices_from_s = -math.inf
        self._memories: dict[tuple[float, float | None], RoleMemory] = {}
        """By aims, those that were looked at last at the end."""
        self._unsure: set[EngineKey] = set()
        by_kind: dict[object, list[EngineT]] = {}
        for engine in engines:
            descriptor = engine.descriptor
            if descriptor.role is not EngineRole.ENCODE:
                by_kind.setdefault((descriptor.model_version, descriptor.pairing), []).append(engine)
        self.groups = [
            EngineGroup(group, [book.work_of(engine.descriptor) for engine in group]) for group in by_kind.values()
        ]
        for producers in self.groups:
            for consumers in self.groups:
                one, other = producers.engines[0].descriptor, consumers.engines[0].descriptor
                if find_refusal(one, other) is None:
                    producers.consumers.append(consumers)
        works = [
            (engine, work) for group in self.groups for engine, work in zip(group.engines, group.works, strict=True)
        ]
        self._works_of = {
            role: [work for engine, work in works if engine.descriptor.role is role] for role in EngineRole
        }
        self.positions: dict[EngineKey, tuple[EngineGroup[EngineT], int]] = {}
        """The group of each engine, and its number there."""
        for group in self.groups:
            for index, engine in enumerate(group.engines):
                self.positions[engine.descriptor.key] = group, index
                self.update(group.works[index])

    def role_choice(self, itl_s: float | None, ttft_s: float | None, now_s: float) -> RoleChoice:
        """Return how much roles count for requests with these aims; None: they have none.

        Roles are weighed where one engine has none: it can do any part of any request.
        """
        prefill, decode = (self._works_of[role] for role in (EngineRole.PREFILL, EngineRole.DECODE))
        if itl_s is None or not prefill or not decode or self._works_of[EngineRole.BOTH]:
            return RoleChoice()
        if not 0 <= now_s - self._choices_from_s < _CHOICE_LASTS_S:
            self._choices_from_s = now_s
            self._role_choices.clear()
        aims = itl_s, ttft_s
        if (known := self._role_choices.get(aims)) is not None:
            return known
        if len(self._role_choices) >= _MAX_AIMS:
            return RoleChoice()
        offered = self._book.offered(group.works[0].key for group in self.groups)
        memory = self._memories.pop(aims, None) or RoleMemory()
        self._memories[aims] = memory
        if len(self._memories) > _MAX_AIMS:
            del self._memories[next(iter(self._memories))]
        chosen = choose_role_use(offered, prefill, decode, itl_s, ttft_s, memory=memory, now_s=now_s)
        self._role_choices[aims] = chosen
        return chosen

    def engine_of(self, key: EngineKey) -> EngineT:
        """Return an engine of the snapshot."""
        group, index = self.positions[key]
        return group.engines[index]

    @property
    def is_sure(self) -> bool:
        """Whether the steps of each engine can be predicted."""
        return not self._unsure

    def update(self, work: EngineWork) -> None:
        """Take in that an engine's work has changed."""
        position = self.positions.get(work.key)
        if position is not None:
            group, index = position
            if work.prediction is None:
                self._unsure.add(work.key)
            else:
                self._unsure.discard(work.key)
                group.update(index, self.usual)
