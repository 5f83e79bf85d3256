"""Chooses the model version of each request, and with it the engines that the request may use.

While a cluster is updated, engines of two versions serve at once. A request belongs to one version from its
tokenization to its end, retries included: no model continues another model's tokens. If the version leaves the cluster,
a request whose client has received something ends; any other request may start over on another version.
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
    """The loaded versions, by number. A version gets requests once it is loaded and engines of it serve."""

    def __init__(self, *versions: ModelVersion) -> None:
        self._versions = {version.version: version for version in versions}

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def get(self, version: int) -> ModelVersion | None:
        """Return a version; None if it is not loaded."""
        return self._versions.get(version)

    def put(self, version: ModelVersion) -> None:
        """Add a version, in place of an earlier one with the same number."""
        self._versions[version.version] = version

    def keep(self, versions: Collection[int]) -> None:
        """Drop and close the versions that are not in `versions`. If that would leave none, the newest one stays.

        An ingress without any version could not tokenize a request.
        """
        newest = max(self._versions, default=0)
        kept = [version for version in self._versions if version in versions] or [newest]
        for version in self._versions.keys() - set(kept):
            self._versions.pop(version).input_processor.close()

    def close(self) -> None:
        """Close every version's input processor. No request may come after that."""
        for version in self._versions.values():
            version.input_processor.close()

    def newest(self, engines: Iterable[EngineLoad]) -> ModelVersion:
        """Return the newest version that has engines; the newest loaded version if none has."""
        serving = {engine.descriptor.model_version for engine in engines} & self._versions.keys()
        return self._versions[max(serving or self._versions)]

    def choose(self, engines: Sequence[EngineConnection], in_flight: Iterable[int]) -> ModelVersion:
        """Choose the version for a new request: the one with the fewest requests for each engine that decodes.

        So the load follows the engines from one version to the next. A version that has only prefill engines gets
        requests if no other version has engines that decode. Without any engine the newest version is chosen.
        in_flight: the version of each request that this ingress works on
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
        """Return whether any loaded version has an engine among these."""
        return any(engine.descriptor.model_version in self._versions for engine in engines)

    def _by_version(self, engines: Iterable[EngineT]) -> dict[int, list[EngineT]]:
        """Return the engines of each version that has an engine that decodes; of every version if none has."""
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
    """An EnginePool for one request, which contains only engines of the request's model version.

    model:    the version
    is_bound: whether the client has received something, so that the request cannot start over on another version
    """

    def __init__(self, engines: EnginePool, versions: ModelVersions, model: ModelVersion, *, is_bound: bool) -> None:
        self._engines = engines
        self._versions = versions
        self.model = model
        self.is_bound = is_bound

    def snapshot(self) -> Sequence[EngineConnection]:
        """Return the engines of this version that serve now.

        Raises ModelVersionLeft if there are none, and either none will come or the request can start over on another
        version that has engines.
        """
        version, engines = self.model.version, self._engines.snapshot()
        is_mixed = any(engine.descriptor.model_version != version for engine in engines)
        # Routers keep what they know of a list of engines as long as it is the same list.
        own = [e for e in engines if e.descriptor.model_version == version] if is_mixed else engines
        has_left = version not in self._versions
        if not own and (has_left or (not self.is_bound and self._versions.has_engines(engines))):
            raise ModelVersionLeft(version)
        return own

    def next_change(self) -> asyncio.Event:
        """Return an event that is set once engines of any version have come after this call."""
        return self._engines.next_change()
