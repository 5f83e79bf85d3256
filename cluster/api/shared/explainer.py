"""Explains where a request went and why: finds its records at all ingresses, for those who may see the request.

A tenant may see its own requests, and an operator all of them. Another tenant's request gets the same answer as one
that never was.
"""

from __future__ import annotations

import asyncio
import reprlib
from dataclasses import dataclass
from typing import Final

from cluster.access.caller import Caller
from cluster.api.protos.loopback_addresses import is_loopback
from cluster.api.shared.admin import ClusterAdmin
from cluster.errors import (
    ControllerUnavailable,
    FieldViolation,
    InvalidRequest,
    PermissionDenied,
    RecordNotFound,
    RecordsAreOff,
)
from cluster.observability.request_records import (
    MAX_LAST,
    FoundRecords,
    RecordQuery,
    UnansweredIngress,
    of_one_request,
)
from cluster.requests.serving import Serving
from cluster.routing.request_record import RequestRecord
from cluster.settings.ingress import IngressConfig

_TIMEOUT_S: Final = 5.0
_MAX_AT_ONCE: Final = 4
"""The most searches at other ingresses at a time."""
_BATCH: Final = 500
"""The records that are decoded at a time, in some milliseconds; each ingress may send as many."""
_MAX_RECORDS: Final = 64
_MAX_BYTES: Final = 1 << 20
_MAX_LAST_BYTES: Final = 2 << 20
_MAX_TENANT_CHARS: Final = 64
_OTHERS: Final = "all other ingresses"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The records of one request and of its samples, or of the last requests, by arrival.

    A request that was resumed has a record at each ingress.
    unanswered:   the ingresses that may have further records and did not answer
    num_left_out: how many records were found beside those that fit into an answer
    """

    records: tuple[RequestRecord, ...]
    unanswered: tuple[UnansweredIngress, ...] = ()
    num_left_out: int = 0


class Explainer:
    """Finds records for the callers of one ingress. It belongs to one event loop."""

    def __init__(self, serving: Serving, admin: ClusterAdmin, settings: IngressConfig, why_off: str = "") -> None:
        """Keep what is asked.

        admin:    asks the other ingresses
        settings: the same at every ingress
        why_off:  why nobody may ask here; "": callers may
        """
        self._serving = serving
        self._admin = admin
        self._settings = settings
        self._why_off = why_off
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)

    async def explain(self, request_id: str, tenant: str | None, caller: Caller) -> Explanation:
        """Return the records of a request. The call takes 5 seconds at most, whatever ingresses do not answer.

        request_id: the whole id, or a beginning that only one id of the requests that the caller may see has; before it
                    may stand the request's tenant and a slash
        tenant:     whose request it is; None: the caller's own, and for an operator anybody's
        Raises PermissionDenied, InvalidRequest, RecordsAreOff, RecordNotFound, AllowanceSpent.
        """
        self._check_on()
        self._check(request_id, tenant)
        caller.allowance.take_request()
        if self._serving.records.is_off:
            raise RecordsAreOff
        if not caller.may_administer:
            if tenant not in (None, caller.tenant):
                raise self._not_found(request_id, ())
            tenant = caller.tenant
        query = RecordQuery(request_id, tenant)
        found, unanswered = await self._find(query)
        records = of_one_request(found, query)
        if not records:
            raise self._not_found(request_id, unanswered)
        kept = _that_fit(records[:_MAX_RECORDS], _MAX_BYTES)
        return Explanation(tuple(kept), unanswered, len(records) - len(kept))

    async def explain_last(self, last: int, tenant: str | None, caller: Caller) -> Explanation:
        """Return the records of the last requests of all ingresses, those in flight included; there may be none.

        last:   the number of requests; fewer are returned if their records are too large together
        tenant: whose requests; None: the caller's own, and for an operator everybody's
        Raises PermissionDenied, InvalidRequest, RecordsAreOff, AllowanceSpent. The call takes 5 seconds at most.
        """
        self._check_on()
        if not 0 < last <= MAX_LAST:
            raise InvalidRequest(FieldViolation("last", str(last), f"1 to {MAX_LAST}"))
        self._check_tenant(tenant)
        caller.allowance.take_request()
        if self._serving.records.is_off:
            raise RecordsAreOff
        if not caller.may_administer:
            if tenant not in (None, caller.tenant):
                return Explanation(())
            tenant = caller.tenant
        records, unanswered = await self._find(RecordQuery("", tenant, last))
        newest = records[-last:]
        kept = _that_fit(newest[::-1], _MAX_LAST_BYTES)[::-1]
        return Explanation(tuple(kept), unanswered, len(newest) - len(kept))

    def _check_on(self) -> None:
        if self._why_off:
            raise PermissionDenied(self._why_off)

    async def _find(self, query: RecordQuery) -> tuple[list[RequestRecord], tuple[UnansweredIngress, ...]]:
        """Return the records of all ingresses, by arrival, and which ingresses did not answer."""
        here = self._serving.find_records(query)
        elsewhere = await self._ask_others(query)
        records: list[RequestRecord] = []
        found = (*here, *elsewhere.records)
        for begin in range(0, len(found), _BATCH):
            records += map(RequestRecord.from_bytes, found[begin : begin + _BATCH])
            await asyncio.sleep(0)  # The tokens of streams go out between the batches.
        return sorted(records, key=lambda one: one.arrived_at_s), elsewhere.unanswered

    async def _ask_others(self, query: RecordQuery) -> FoundRecords:
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._turns:
                return await self._admin.find_records(query)
        except TimeoutError:
            reason = f"no answer within {_TIMEOUT_S:g} s"
        except ControllerUnavailable as error:
            reason = str(error)
        return FoundRecords(unanswered=(UnansweredIngress(_OTHERS, reason),))

    def _check(self, request_id: str, tenant: str | None) -> None:
        most = self._settings.limits.max_request_id_chars
        if "/" in request_id:
            most += _MAX_TENANT_CHARS + 1
        if not 0 < len(request_id) <= most or not (request_id.isascii() and request_id.isprintable()):
            allowed = f"1 to {most} printable ASCII characters"
            raise InvalidRequest(FieldViolation("request_id", reprlib.repr(request_id), allowed))
        self._check_tenant(tenant)

    def _check_tenant(self, tenant: str | None) -> None:
        if tenant is not None and len(tenant) > _MAX_TENANT_CHARS:
            allowed = f"at most {_MAX_TENANT_CHARS} characters"
            raise InvalidRequest(FieldViolation("tenant", reprlib.repr(tenant), allowed))

    def _not_found(self, request_id: str, unanswered: tuple[UnansweredIngress, ...]) -> RecordNotFound:
        settings = self._settings
        kept = (
            f"Each ingress keeps those of its last {settings.max_request_records} requests "
            f"(ingress.max_request_records), in {settings.request_records_mib} MiB at most "
            "(ingress.request_records_mib)"
        )
        return RecordNotFound(request_id, kept, list(map(str, unanswered)))


def why_off_for_clients(settings: IngressConfig, *, asks_for_tokens: bool) -> str:
    """Return why requests must not be explained at the clients' port; "" if they may.

    A caller who shows no token may see the requests of all, so only callers on this host may do without one, and only
    where operators have no port of their own.
    """
    if asks_for_tokens:
        return ""
    if settings.admin_port is not None:
        return "requests are explained at the port ingress.admin_port, since clients need no token here"
    if not is_loopback(settings.host):
        return (
            f"explain is off, because this ingress listens beyond loopback (ingress.host: {settings.host}) and asks "
            "for no tokens: set ingress.tokens, or ingress.admin_port and ask there"
        )
    return ""


def _that_fit(records: list[RequestRecord], max_bytes: int) -> list[RequestRecord]:
    kept, size_bytes = [], 0
    for record in records:
        size_bytes += len(record.to_bytes())
        if size_bytes > max_bytes:
            break
        kept.append(record)
    return kept
