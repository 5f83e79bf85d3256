"""Keep engines from one test to the next: a start costs more than most tests, so only the dead are replaced."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from cluster.routing.engine_connection import EngineRole
from tests.faults.engine_child import EngineSpec
from tests.faults.engine_process import EngineProcess


class EngineHouse:
    """Keeps the engines that are alive and have nothing left of the test before: they are as good as new."""

    def __init__(self) -> None:
        self._kept: dict[str, EngineProcess] = {}
        self._incarnations: Counter[str] = Counter()
        self.numbers = itertools.count()
        """For requests: a kept engine has seen those of earlier tests."""

    def take(self, spec: EngineSpec, role: EngineRole, *, is_fresh: bool = False) -> EngineProcess:
        """Such an engine, of whatever incarnation. is_fresh: one that has no links yet."""
        kept = self._kept.pop(_key(spec, role), None)
        if kept is not None:
            if not is_fresh and kept.begin_test():
                return kept
            kept.end()
        return EngineProcess(replace(spec, incarnation=self._next_incarnation(spec)), role)

    def take_next_incarnation(self, process: EngineProcess, *, same_port: bool) -> EngineProcess:
        """Start an engine that is dead again, under a new incarnation."""
        assert not process.is_alive
        port = int(process.address.rpartition(":")[2]) if same_port else 0
        spec = process.spec
        place = replace(spec.place, port=port)
        return EngineProcess(replace(spec, incarnation=self._next_incarnation(spec), place=place), process.role)

    def give_back(self, process: EngineProcess) -> None:
        """The test is over."""
        spec = process.spec
        key = _key(spec, process.role)
        if process.is_alive and key not in self._kept:
            self._kept[key] = process
        else:
            process.end()

    def end(self) -> None:
        """End all that is kept."""
        while self._kept:
            self._kept.popitem()[1].end()

    def _next_incarnation(self, spec: EngineSpec) -> int:
        self._incarnations[spec.engine_id] += 1
        return self._incarnations[spec.engine_id]


def _key(spec: EngineSpec, role: EngineRole) -> str:
    """Return the same text for engines that can stand in for each other."""
    return repr((replace(spec, incarnation=0, place=replace(spec.place, port=0)), role))
