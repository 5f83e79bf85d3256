"""Who serves, as a numbered snapshot: a receiver takes a newer one and ignores an older one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.engine_connection import EngineDescriptor, EngineKey, EngineRole


@dataclass(frozen=True, slots=True)
class Membership:
    """The engines that are ready, as of this version. draining: those of them that get no new requests."""

    version: int
    engines: tuple[EngineDescriptor, ...]
    draining: frozenset[EngineKey] = frozenset()

    def with_engine(self, engine: EngineDescriptor) -> Membership:
        """The next version, in which this engine serves (instead of an older incarnation of it)."""
        others = tuple(member for member in self.engines if member.engine_id != engine.engine_id)
        return self._next((*others, engine), self.draining)

    def with_role(self, engine_id: str, incarnation: int, role: EngineRole) -> Membership:
        """The next version, in which this engine serves in another role; the same one if there is nothing to change."""
        engines = tuple(
            replace(member, role=role) if member.key == (engine_id, incarnation) else member for member in self.engines
        )
        return self if engines == self.engines else self._next(engines, self.draining)

    def with_draining(self, engine_id: str, incarnation: int) -> Membership:
        """The next version, in which this engine gets no new requests; the same one if it does not serve."""
        key = (engine_id, incarnation)
        if key in self.draining or all(member.key != key for member in self.engines):
            return self
        return self._next(self.engines, self.draining | {key})

    def without_engine(self, engine_id: str, incarnation: int) -> Membership:
        """The next version, in which this incarnation does not serve; the same version if it did not anyway."""
        rest = tuple(member for member in self.engines if member.key != (engine_id, incarnation))
        return self if len(rest) == len(self.engines) else self._next(rest, self.draining)

    def _next(self, engines: tuple[EngineDescriptor, ...], draining: frozenset[EngineKey]) -> Membership:
        return Membership(self.version + 1, engines, draining & {engine.key for engine in engines})
