"""Defines the membership: a numbered snapshot of the engines that serve. Receivers ignore a snapshot that is older."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from actors.core.requests.adapter import Adapter
from actors.model_facts import ModelFacts
from cluster.routing.engine_connection import EngineDescriptor, EngineKey, EngineRole


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A version of the model.

    directory: the directory of its checkpoint
    facts:     what an ingress has to know of the loaded model
    """

    version: int
    directory: str
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Membership:
    """The engines that are ready, as of this version.

    draining: the ready engines that get no new requests
    models:   the model versions of these engines and of engines that are about to start, by number; empty: the version
              that the cluster was started with
    adapters: the registered LoRA adapters
    """

    version: int
    engines: tuple[EngineDescriptor, ...]
    draining: frozenset[EngineKey] = frozenset()
    models: tuple[ServedModel, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    def with_adapters(self, adapters: Iterable[Adapter]) -> Membership:
        """Return the next version, in which these adapters are registered."""
        return replace(self, version=self.version + 1, adapters=tuple(adapters))

    def with_model(self, model: ServedModel) -> Membership:
        """Return the next version, which has this model in place of one with the same number; itself if unchanged.

        The controller adds a model before the first engine of it serves, so that ingresses have time to load its
        tokenizer. A model that no engine has any more is dropped once engines of a newer one serve.
        """
        if model in self.models:
            return self
        others = [known for known in self.models if known.version != model.version]
        models = sorted([*others, model], key=lambda known: known.version)
        return replace(self, version=self.version + 1, models=tuple(models))

    def with_engine(self, engine: EngineDescriptor) -> Membership:
        """Return the next version, in which this engine serves, instead of an older incarnation of it."""
        others = tuple(member for member in self.engines if member.engine_id != engine.engine_id)
        return self._next((*others, engine), self.draining)

    def with_role(self, engine_id: str, incarnation: int, role: EngineRole) -> Membership:
        """Return the next version, in which this engine has another role; this version if nothing changes."""
        engines = tuple(
            replace(member, role=role) if member.key == (engine_id, incarnation) else member for member in self.engines
        )
        return self if engines == self.engines else self._next(engines, self.draining)

    def with_draining(self, engine_id: str, incarnation: int) -> Membership:
        """Return the next version, in which this engine gets no new requests; this version if nothing changes."""
        key = (engine_id, incarnation)
        if key in self.draining or all(member.key != key for member in self.engines):
            return self
        return self._next(self.engines, self.draining | {key})

    def without_engine(self, engine_id: str, incarnation: int) -> Membership:
        """Return the next version, in which this incarnation does not serve; this version if nothing changes."""
        rest = tuple(member for member in self.engines if member.key != (engine_id, incarnation))
        return self if len(rest) == len(self.engines) else self._next(rest, self.draining)

    def _next(self, engines: tuple[EngineDescriptor, ...], draining: frozenset[EngineKey]) -> Membership:
        served = {engine.model_version for engine in engines}
        newest = max(served, default=0)
        models = tuple(model for model in self.models if model.version in served or model.version > newest)
        draining &= {engine.key for engine in engines}
        return replace(self, version=self.version + 1, engines=engines, draining=draining, models=models)
