"""The caller: who makes a call, what the caller may do, and how code that handles the call finds the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Final

from actors.core.requests.slo import Slo
from cluster.access.aims import AIMS, NO_AIMS, Aims
from cluster.access.allowance import Allowance
from cluster.errors import PermissionDenied


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of an API, as its bearer token identifies it.

    name:             the token's name, for logs and errors; "" if no tokens are needed
    tenant:           the token's tenant, the unit of fair scheduling and of sharing cached prompts; "" without tenants
    may_administer:   whether the caller may use AdminService
    highest_priority: the lowest priority number that requests may have (lower numbers go first); None: any
    adapters:         the LoRA adapters that requests may use; None: any
    slo:              the aims of requests that give none
    tightest_slo:     the smallest aims that requests may give
    allowance:        the token's limits and their use
    """

    name: str = ""
    tenant: str = ""
    may_administer: bool = False
    highest_priority: int | None = None
    adapters: frozenset[str] | None = None
    slo: Aims = NO_AIMS
    tightest_slo: Aims = NO_AIMS
    allowance: Allowance = field(default_factory=Allowance, compare=False, repr=False)

    def priority(self, asked: int) -> int:
        """Return the priority of a request that asks for a priority.

        A request that asks for none (0) gets 0, or the highest allowed priority if 0 is not allowed. Raises
        PermissionDenied if the request asks for more than is allowed.
        """
        highest = self.highest_priority
        if highest is None or asked >= highest:
            return asked
        if asked == 0:
            return highest
        raise PermissionDenied(
            f"priority is {asked}; token {self.name!r} may have {highest} and above (lower is first)"
        )

    def aims(self, asked: Aims, of_cluster: Aims) -> Slo | None:
        """Return the aims of a request: its own, else the token's, else the cluster's; None if there is none.

        Aims that the request did not give are no tighter than the token allows. Raises PermissionDenied if the request
        gives a tighter one.
        """
        aims = Aims.first_of(asked, self.slo, of_cluster)
        for name in AIMS:
            tightest, aim = getattr(self.tightest_slo, name), getattr(aims, name)
            if tightest is None or aim is None or aim >= tightest:
                continue
            if getattr(asked, name) is not None:
                raise PermissionDenied(
                    f"slo.{name} is {aim:g}; token {self.name!r} may have {tightest:g} and above (in milliseconds)"
                )
            aims = replace(aims, **{name: tightest})
        return aims.slo

    def may_use(self, adapter: str) -> bool:
        """Whether requests may use an adapter. Errors do not tell forbidden adapters from unknown ones."""
        return self.adapters is None or adapter in self.adapters

    def check_administers(self) -> None:
        """Raise PermissionDenied if the caller may not use AdminService."""
        if not self.may_administer:
            raise PermissionDenied(f"token {self.name!r} may not use AdminService; use one with `admin: true`")

    def salted(self, cache_salt: str) -> str | None:
        """Return the cache_salt that engines get for a request, or None for none; it differs between tenants.

        cache_salt: the request's own; "" for none
        """
        # A tenant's name has no slash, so two tenants cannot get the same result.
        return f"{self.tenant}/{cache_salt}" if self.tenant else cache_salt or None


ANYBODY: Final = Caller(may_administer=True)
"""The caller in a cluster without tokens: it has no limits and no tenant, and may do everything."""

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def current_caller() -> Caller:
    """Return the caller whose call the current task handles; ANYBODY outside of calls."""
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Set the caller for the rest of the current task and the tasks that it starts.

    Each call needs a task of its own.
    """
    _caller.set(caller)


@contextmanager
def calling_as(caller: Caller) -> Iterator[None]:
    """Set the caller that current_caller() returns within the context."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)
