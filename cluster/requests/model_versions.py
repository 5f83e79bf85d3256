"""The model versions that an ingress can serve: which one a request gets, and which engines it may then use.

While a cluster is updated, engines of two versions serve at once. A request belongs to one of them from its
tokenization to its end, retries included: tokens of one model are never continued by another. Once its client has been
told something, a request whose version leaves is over. Before that it may start over on another version.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cluster.errors import ModelVersionLeft
from cluster.routing.base import EngineLoad, Router, candidates
from cluster.routing.engine_connection import EngineConnection, EnginePool
from cluster.text.input_processor import InputProcessor

EngineT = TypeVar("EngineT", bound=EngineLoad)


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """The tokenizer and the router for requests of one model version."""

    version: int
    input_processor: InputProcessor
    router: Router


class ModelVersions:
    """The loaded versions, by their numbers. A version gets requests once it is here and has engines that serve."""

    def __init__(self, *versions: ModelVersion) -> None:
        self._versions = {version.version: version for version in versions}

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def get(self, version: int) -> ModelVersion | None:
        """A version, if it is loaded."""
        return self._versions.get(version)

    def put(self, version: ModelVersion) -> None:
        """Serve it from now on, in place of what had its number."""
        self._versions[version.version] = version

    def keep(self, versions: Collection[int]) -> None:
        """The others have left; the newest one stays anyway, for without any no request can be understood."""
        newest = max(self._versions, default=0)
        kept = [version for version in self._versions if version in versions] or [newest]
        for version in self._versions.keys() - set(kept):
            self._versions.pop(version).input_processor.close()

    def close(self) -> None:
        """No request will come any more."""
        for version in self._versions.values():
            version.input_processor.close()

    def newest(self, engines: Iterable[EngineLoad]) -> ModelVersion:
        """The newest one that serves; the newest one if none does."""
        serving = {engine.descriptor.model_version for engine in engines} & self._versions.keys()
        return self._versions[max(serving or self._versions)]

    def choose(self, engines: Sequence[EngineConnection], in_flight: Iterable[int]) -> ModelVersion:
        """The version for a new request: the one with the fewest requests for each engine that decodes.

        So the load follows the engines from one version to the next. A version of which only prefill engines are there
        gets requests if no other version has engines that decode. Without any engine it is the newest one.
        in_flight: the versions of the requests that this ingress works on
        """
        if len(self._versions) == 1:
            return next(iter(self._versions.values()))
        groups = self._by_version(engines)
        if not groups:
            return self.newest(engines)
        num_requests = Counter(in_flight)

        def load(version: int) -> tuple[float, int]:
            num_decoding = sum(len(group.decode) for group in candidates(groups[version]))
            return num_requests[version] / num_decoding, -version

        return self._versions[min(groups, key=load)]

    def has_engines(self, engines: Iterable[EngineLoad]) -> bool:
        """Whether any version could serve a request now."""
        return any(engine.descriptor.model_version in self._versions for engine in engines)

    def _by_version(self, engines: Iterable[EngineT]) -> dict[int, list[EngineT]]:
        """The engines of each version that has any which decode, or of each one if there is no such version."""
        groups: dict[int, list[EngineT]] = {}
        for engine in engines:
            if engine.descriptor.model_version in self._versions:
                groups.setdefault(engine.descriptor.model_version, []).append(engine)
        decoding = {
            version: group
            for version, group in groups.items()
            if any(engine.descriptor.role.generates for engine in group)
        }
        return decoding or groups


class EnginesOfVersion:
    """An EnginePool for one request: the engines of its model version, and no others.

    model:    the version
    is_bound: its client has been told something, so it cannot start over on another version
    """

    def __init__(self, engines: EnginePool, versions: ModelVersions, model: ModelVersion, *, is_bound: bool) -> None:
        self._engines = engines
        self._versions = versions
        self.model = model
        self.is_bound = is_bound

    def snapshot(self) -> Sequence[EngineConnection]:
        """The engines of this version that serve now.

        Raises ModelVersionLeft if there are none and none will come, or if the request may as well start over.
        """
        version, engines = self.model.version, self._engines.snapshot()
        own = [engine for engine in engines if engine.descriptor.model_version == version]
        has_left = version not in self._versions
        if not own and (has_left or (not self.is_bound and self._versions.has_engines(engines))):
            raise ModelVersionLeft(version)
        return own

    def next_change(self) -> asyncio.Event:
        """An event that is set when engines, of whatever version, have come since this call."""
        return self._engines.next_change()
