"""The ingresses of a cluster in the controller: actors, each of which can be replaced at any time.

Each ingress has a number, which stays the same from one incarnation to the next, and so do its ports: clients reach the
next incarnation at the same address. The controller tells ingresses which engines serve (the membership, in numbered
versions, sent again to an ingress that is behind) and the facts of the model. ingress_starter.py starts ingresses,
ingress_table.py holds them and gives them up, and this file watches them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Final

from actors.model_facts import ModelFacts
from actors.process.ray_calls import FailureKind, RayCallFailed, call
from cluster.config import ClusterConfig
from cluster.errors import CannotStart
from cluster.observability.request_records import FoundRecords, RecordQuery, UnansweredIngress
from cluster.observability.status import IngressView, ingress_name
from cluster.planning.offered_load import LoadWindow
from cluster.pool.cluster_trust import ClusterTrust
from cluster.pool.ingresses.ingress_incarnation import IngressIncarnation, SavedIngress
from cluster.pool.ingresses.ingress_starter import IngressStarter
from cluster.pool.journal import Journal
from cluster.pool.owned_tasks import OwnedTasks
from cluster.pool.ray_objects.head_probe import HeadProbe
from cluster.pool.ray_objects.heartbeat import ActorLost
from cluster.pool.ray_objects.ray_actors import one_line
from cluster.routing.engine_connection import EngineDescriptor
from cluster.sessions.cluster_membership import Membership, ServedModel

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S: Final = 30.0
_RECORDS_TIMEOUT_S: Final = 2.0
_MAX_REASON_CHARS: Final = 300
_PROOF_TIMEOUT_S: Final = 150.0
_MAX_DEATHS_OF_ONE_PROOF: Final = 3


class IngressFleet:
    """All ingresses of a cluster. Only the controller's event loop uses this object."""

    def __init__(
        self,
        config: ClusterConfig,
        starter: IngressStarter,
        journal: Journal,
        head: HeadProbe,
        trust: ClusterTrust,
    ) -> None:
        """starter: starts this fleet's ingresses; head: the probe of Ray's head; trust: the cluster's secrets"""
        self._config = config
        self._trust = trust
        self._journal = journal
        self._head = head
        self._starter = starter
        self._table = starter.table
        self._acting = OwnedTasks()

    @property
    def addresses(self) -> list[str]:
        """The gRPC address, host:port, of every ingress that lets clients in, in the order of their numbers."""
        return self._table.addresses()

    @property
    def http_addresses(self) -> list[str]:
        """The HTTP address, host:port, of every ingress that lets clients in and has an HTTP API."""
        return self._table.http_addresses()

    @property
    def facts(self) -> ModelFacts | None:
        """The model's facts that ingresses got when they let clients in; None before the first one did."""
        return self._table.facts

    def actors(self) -> list[Any]:
        """Return Ray's handle of every ingress."""
        return [ingress.actor for ingress in self._table.by_number.values()]

    def missing(self) -> str:
        """Return, in words, what ingresses need if none is up; empty if one is."""
        ingress = self._config.ingress
        needs = f"each needs {ingress.resources} on a node that is labelled {ingress.labels}"
        return "" if self._table.begun() else f"no ingress is up: {needs}"

    @property
    def refusal(self) -> str:
        """Why no ingress can ever start with these settings; empty while an ingress is up or may come up."""
        return self._starter.refusal

    def views(self) -> tuple[IngressView, ...]:
        """Return the status of each ingress, and of each wanted number without one."""
        return self._table.views(self._starter.wanted.numbers)

    async def find_records(self, query: RecordQuery, asker: str) -> FoundRecords:
        """Ask every ingress but the asker for the records of a request; those that do not answer in time are named.

        asker: the name of the ingress that asks
        """
        asked = [one for one in self._table.begun() if one.is_open and one.name != asker]
        answers = await asyncio.gather(*(_records_of(ingress, query) for ingress in asked))
        unanswered = [answer for answer in answers if isinstance(answer, UnansweredIngress)]
        for view in self.views():
            if (ingress := self._table.by_number.get(view.number)) is None or not ingress.is_open:
                reason = f"it is {view.state}{': ' if view.last_error else ''}{view.last_error}"
                unanswered.append(UnansweredIngress(ingress_name(view.number), reason[:_MAX_REASON_CHARS]))
        found = [data for answer in answers if not isinstance(answer, UnansweredIngress) for data in answer]
        return FoundRecords(tuple(found), tuple(unanswered))

    async def offered_load(self, newest: Mapping[str, int]) -> dict[str, list[LoadWindow]]:
        """Ask every ingress that lets clients in for its complete windows of offered load.

        newest: the number of the newest window that each ingress has told, by its name; 0 if it is missing
        Returns the windows since then by the ingress's name. An ingress that does not answer has an empty list.
        """
        asked = [one for one in self._table.begun() if one.is_open]
        told = await asyncio.gather(*(_load_of(ingress, newest.get(ingress.name, 0) + 1) for ingress in asked))
        return {ingress.name: windows for ingress, windows in zip(asked, told, strict=True)}

    # -- starting ------------------------------------------------------------------------------------------------

    async def start_missing(self, now_s: float) -> None:
        """Begin to start the missing ingresses whose backoff is over; settled() waits for them. now_s: Unix time"""
        await self._starter.start_missing(now_s)

    async def settled(self) -> None:
        """Wait until the ingresses that are being started are up, or given up."""
        await self._starter.settled()

    async def open(self, facts: ModelFacts) -> None:
        """Let clients in at every ingress; ingresses that start later let clients in at once."""
        await self._starter.open(facts)

    def saved(self) -> tuple[SavedIngress, ...]:
        """Return what a later controller has to know."""
        return self._table.saved(self._starter.wanted.home_of)

    async def restore(self, saved: Sequence[SavedIngress], membership: Membership, facts: ModelFacts | None) -> None:
        """Take over the ingresses of an earlier controller that still run."""
        self._table.membership, self._table.facts = membership, facts
        for ingress in saved:
            self._starter.wanted.restore(ingress.number, ingress.home)
        await self._table.restore(saved)

    # -- canaries and the membership -----------------------------------------------------------------------------

    async def prove(
        self, prefill: EngineDescriptor | None, decode: EngineDescriptor, facts: ModelFacts, now_s: float
    ) -> None:
        """Send a canary request through a pair of engines, once an ingress is up. Raises CannotStart if it fails.

        prefill: None if the decode engine answers the canary alone
        facts:   of the model that the engines serve
        now_s:   Unix time
        If the ingress dies meanwhile, another one sends the canary; after three such deaths the canary has failed.
        """
        num_deaths = 0
        while True:
            for ingress in self._table.begun():
                try:
                    await call(ingress.actor.prove, prefill, decode, facts, timeout_s=_PROOF_TIMEOUT_S)
                    return
                except RayCallFailed as failed:
                    if failed.kind is FailureKind.RAISED:
                        raise CannotStart(str(failed)) from failed
                    num_deaths += 1
                    await self._table.give_up(ingress, str(failed))
                    if num_deaths == _MAX_DEATHS_OF_ONE_PROOF:
                        raise CannotStart(f"{num_deaths} ingresses died trying {decode.engine_id}") from failed
            await self.start_missing(now_s)
            # Some ingresses must wait before their next attempt; the controller's rounds start those.
            await asyncio.wait({asyncio.ensure_future(self.settled())}, timeout=self._config.heartbeat_interval_s)
            if not self._starter.is_starting:
                await asyncio.sleep(self._config.heartbeat_interval_s)

    async def prepare(self, model: ServedModel) -> None:
        """Let every ingress load what requests for a model need. Raises CannotStart if an ingress cannot load it.

        An ingress that does not answer loads it later, when it gets the membership with this model.
        """
        for ingress in self._table.begun():
            try:
                await call(ingress.actor.prepare, model, timeout_s=_CALL_TIMEOUT_S)
            except RayCallFailed as failed:
                if failed.kind is FailureKind.RAISED:
                    raise CannotStart(str(failed)) from failed
                fields = {"ingress": ingress.number, "error": str(failed)}
                logger.warning("an ingress has not loaded the model's files yet", extra=fields)

    async def publish(self, membership: Membership) -> None:
        """Send the membership to every ingress. An ingress that does not answer gets it when it answers again."""
        self._table.membership = membership
        for ingress in self._table.by_number.values():
            ingress.is_behind = True
        await self._for_all(lambda ingress: ingress.send(self._table.membership))

    # -- health --------------------------------------------------------------------------------------------------

    async def look(self, now_s: float, avoided: Collection[str] = ()) -> int:
        """Check every ingress: replace dead ones, and send the membership to those that are behind.

        now_s:   Unix time
        avoided: ids of nodes on which no ingress may stay
        Returns the newest membership version that an ingress has.
        """
        self._starter.avoid(avoided)
        await self._for_all(self._look_at)
        for ingress in [ingress for ingress in self._table.begun() if ingress.node_id in avoided]:
            self._leave(ingress)
        await self.start_missing(now_s)
        return max((ingress.health.membership_version for ingress in self._table.by_number.values()), default=0)

    async def _for_all(self, act: Callable[[IngressIncarnation], Coroutine[None, None, None]]) -> None:
        """Call act() for every ingress at once, and wait for one heartbeat interval; slow calls go on afterwards."""
        tasks = [self._acting.start(self._do(act, ingress)) for ingress in self._table.begun()]
        if tasks:
            await asyncio.wait(tasks, timeout=self._config.heartbeat_interval_s)

    async def _do(
        self, act: Callable[[IngressIncarnation], Coroutine[None, None, None]], ingress: IngressIncarnation
    ) -> None:
        try:
            await act(ingress)
        except Exception as error:
            # Only a bug in raypd leads here. An ingress that nobody watches is worse than one that is restarted.
            logger.exception("an ingress could not be watched", extra={"ingress": ingress.number})
            await self._table.give_up(ingress, f"it could not be watched: {one_line(error)}")

    async def _look_at(self, ingress: IngressIncarnation) -> None:
        # An ingress that accepts no clients yet is still starting, and its start has a deadline of its own.
        if ingress.is_asked or not ingress.is_open:
            return
        ingress.is_asked = True
        try:
            await self._ask(ingress)
        except ActorLost as lost:
            await self._table.give_up(ingress, str(lost))
        finally:
            ingress.is_asked = False

    async def _ask(self, ingress: IngressIncarnation) -> None:
        if not await ingress.look(self._head, self._config.heartbeat_timeout_s):
            return
        if (change := ingress.change_of_business()) is not None:
            self._journal.add(change)
        if (fault := ingress.fault(self._config.ingress.busy_timeout_s)) is not None:
            await self._table.give_up(ingress, fault)
        # A busy ingress gets the new state later: waiting for its answer now would delay the next health check.
        elif not ingress.is_busy:
            await ingress.catch_up(self._table.membership, self._trust)

    def _leave(self, ingress: IngressIncarnation) -> None:
        self._journal.add(f"drain ingress {ingress.number}, incarnation {ingress.incarnation}: its node is drained")
        self._table.forget(ingress)
        self._acting.start(ingress.end(self._config.drain_timeout_s))

    async def stop(self, grace_s: float) -> None:
        """Drain and end every ingress. grace_s: seconds in which requests may finish"""
        self._starter.cancel()
        ingresses, self._table.by_number = list(self._table.by_number.values()), {}
        await asyncio.gather(*(one.end(grace_s) for one in ingresses), *self._acting, return_exceptions=True)


async def _records_of(ingress: IngressIncarnation, query: RecordQuery) -> list[bytes] | UnansweredIngress:
    try:
        found: list[bytes] = await call(ingress.actor.find_records, query, timeout_s=_RECORDS_TIMEOUT_S)
    except RayCallFailed as failed:
        return UnansweredIngress(ingress.name, one_line(failed).splitlines()[0][:_MAX_REASON_CHARS])
    return found


async def _load_of(ingress: IngressIncarnation, number: int) -> list[LoadWindow]:
    try:
        windows: list[LoadWindow] = await call(ingress.actor.offered_load, number, timeout_s=_RECORDS_TIMEOUT_S)
    except RayCallFailed as failed:
        fields = {"ingress": ingress.number, "error": str(failed)}
        logger.warning("an ingress has not told its offered load", extra=fields)
        return []
    return windows
