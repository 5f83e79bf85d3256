"""The interface of the controller by which the APIs let operators see and change a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from actors.engine_profile import EngineProfile
from cluster.observability.request_records import FoundRecords, RecordQuery
from cluster.observability.status import ControllerView
from cluster.routing.engine_connection import EngineRole


class OperatorVerbs(Protocol):
    """The verbs by which an operator changes a running cluster. The controller's Operations carries them out.

    From another process every verb raises ControllerUnavailable if the controller does not answer.
    """

    async def scale(self, counts: Mapping[EngineRole, int]) -> list[str]:
        """Change how many engines of these roles are wanted; returns the ids of all engines that are wanted then."""

    async def drain(self, engine_id: str, *, for_good: bool) -> None:
        """Take an engine out of service once its work is done. Raises UnknownEngine.

        for_good: True: one engine less is wanted; False: a new incarnation replaces it
        """

    async def set_role(self, engine_id: str, role: EngineRole) -> None:
        """Let an engine serve in another role from now on. Raises UnknownEngine."""

    async def reset_prefix_cache(self, engine_id: str, *, preempt: bool) -> dict[str, bool]:
        """Clear the prefix cache of an engine; returns for each engine id whether its cache was cleared.

        engine_id: "" for every engine that serves
        preempt:   whether running requests lose their blocks and start over
        Raises UnknownEngine, EngineRefused.
        """

    async def profile(self, engine_id: str, duration_s: float, *, with_trace: bool) -> EngineProfile:
        """Profile an engine for duration_s seconds. Raises UnknownEngine, EngineRefused."""

    async def rotate_secret(self) -> bool:
        """Replace the cluster's secret; returns whether the old one is refused by now. Raises SecretIsInFile."""

    async def drain_node(self, name: str) -> list[str]:
        """Take everything on a node out of service, and start nothing there any more; returns the engines' ids.

        name: the node's address, hostname or id. Raises UnknownNode.
        """

    async def update(self, directory: str) -> int:
        """Replace the engines, group by group, by ones that serve this checkpoint; returns its version's number.

        Raises InvalidConfig.
        """

    async def load_adapter(self, name: str, directory: str) -> str:
        """Let requests name a LoRA adapter, or replace the weights of one; returns the digest of its files.

        Raises InvalidConfig with the reason why the adapter cannot be served.
        """

    async def unload_adapter(self, name: str) -> None:
        """Let no new request name an adapter that was loaded. Raises AdapterNotFound."""


class ClusterAdmin(OperatorVerbs, Protocol):
    """The controller's methods for operators, in this process or by calls to the controller's actor."""

    async def status(self) -> ControllerView:
        """Return what the controller knows. Raises ControllerUnavailable if it does not answer."""

    async def find_records(self, query: RecordQuery) -> FoundRecords:
        """Ask all other ingresses for the records of a request; each has a deadline, and those that miss it are named.

        Raises ControllerUnavailable.
        """
