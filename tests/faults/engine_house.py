"""Where engines live from one test to the next: a start costs more than most tests, so only the dead are replaced."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from cluster.routing.engine_connection import EngineRole
from tests.faults.engine_child import Life
from tests.faults.engine_process import EngineProcess


class EngineHouse:
    """Those that still live, and have nothing left of the test before, are as good as new."""

    def __init__(self) -> None:
        self._kept: dict[str, EngineProcess] = {}
        self._incarnations: Counter[str] = Counter()
        self.numbers = itertools.count()
        """For requests: a kept engine has seen those of earlier tests."""

    def take(self, life: Life, role: EngineRole, *, is_fresh: bool = False) -> EngineProcess:
        """Such an engine, of whatever incarnation. is_fresh: one that has no links yet."""
        kept = self._kept.pop(_key(life, role), None)
        if kept is not None:
            if not is_fresh and kept.begin_test():
                return kept
            kept.end()
        return EngineProcess(replace(life, incarnation=self._next_incarnation(life)), role)

    def take_next_life(self, process: EngineProcess, *, same_port: bool) -> EngineProcess:
        """Start an engine that is dead again, under a new incarnation."""
        assert not process.is_alive
        port = int(process.address.rpartition(":")[2]) if same_port else 0
        life = process.life
        place = replace(life.place, port=port)
        return EngineProcess(replace(life, incarnation=self._next_incarnation(life), place=place), process.role)

    def give_back(self, process: EngineProcess) -> None:
        """The test is over."""
        life = process.life
        key = _key(life, process.role)
        if process.is_alive and key not in self._kept:
            self._kept[key] = process
        else:
            process.end()

    def end(self) -> None:
        """End all that is kept."""
        while self._kept:
            self._kept.popitem()[1].end()

    def _next_incarnation(self, life: Life) -> int:
        self._incarnations[life.engine_id] += 1
        return self._incarnations[life.engine_id]


def _key(life: Life, role: EngineRole) -> str:
    """What makes an engine another one for tests."""
    return repr((replace(life, incarnation=0, place=replace(life.place, port=0)), role))
