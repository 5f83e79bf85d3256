"""Who serves, as a numbered snapshot: a receiver takes a newer one and ignores an older one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from actors.core.requests.adapter import Adapter
from actors.model_facts import ModelFacts
from cluster.routing.engine_connection import EngineDescriptor, EngineKey, EngineRole


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A version of the model. directory: of its checkpoint; facts: of its engines, for the doors."""

    version: int
    directory: str
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Membership:
    """The engines that are ready, as of this version.

    draining: those of them that get no new requests
    models:   the model versions of its engines, and those that engines are yet to come of, by number. Empty: the one
              that the cluster was started with
    adapters: LoRA adapters that are registered
    """

    version: int
    engines: tuple[EngineDescriptor, ...]
    draining: frozenset[EngineKey] = frozenset()
    models: tuple[ServedModel, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    def with_adapters(self, adapters: Iterable[Adapter]) -> Membership:
        """The next version, in which these adapters are registered."""
        return replace(self, version=self.version + 1, adapters=tuple(adapters))

    def with_model(self, model: ServedModel) -> Membership:
        """The next version, which knows this model, in place of what had its number; the same one if it does already.

        It comes before the model's first engine, so that ingresses have time to load what they need of it. A model that
        no engine has any more leaves once engines of a newer one serve.
        """
        if model in self.models:
            return self
        others = [known for known in self.models if known.version != model.version]
        models = sorted([*others, model], key=lambda known: known.version)
        return replace(self, version=self.version + 1, models=tuple(models))

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
        served = {engine.model_version for engine in engines}
        newest = max(served, default=0)
        models = tuple(model for model in self.models if model.version in served or model.version > newest)
        draining &= {engine.key for engine in engines}
        return replace(self, version=self.version + 1, engines=engines, draining=draining, models=models)
