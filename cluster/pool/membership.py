"""Who serves, as a numbered snapshot: a receiver takes a newer one and ignores an older one."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.engine_connection import EngineDescriptor


@dataclass(frozen=True, slots=True)
class Membership:
    """The engines that are ready, as of this version."""

    version: int
    engines: tuple[EngineDescriptor, ...]

    def with_engine(self, engine: EngineDescriptor) -> Membership:
        """The next version, in which this engine serves (instead of an older incarnation of it)."""
        others = tuple(member for member in self.engines if member.engine_id != engine.engine_id)
        return Membership(self.version + 1, (*others, engine))

    def without_engine(self, engine_id: str, incarnation: int) -> Membership:
        """The next version, in which this incarnation does not serve; the same version if it did not anyway."""
        rest = tuple(
            member for member in self.engines if (member.engine_id, member.incarnation) != (engine_id, incarnation)
        )
        return self if len(rest) == len(self.engines) else Membership(self.version + 1, rest)
