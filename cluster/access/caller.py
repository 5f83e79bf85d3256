"""The caller of a call, for as long as an API works on the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from cluster.access.allowance import Allowance
from cluster.errors import PermissionDenied


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity behind a call, and what its token allows.

    name:             the token's, for logs and errors; "" where no tokens are asked for
    tenant:           who shares the prefix cache, and fairly with others what engines serve; "" where there are none
    may_administer:   whether AdminService answers
    highest_priority: the lowest number that its requests may have (lower goes first); None: any
    adapters:         those that its requests may run with; None: any
    """

    name: str = ""
    tenant: str = ""
    may_administer: bool = False
    highest_priority: int | None = None
    adapters: frozenset[str] | None = None
    allowance: Allowance = field(default_factory=Allowance, compare=False, repr=False)

    def priority(self, asked: int) -> int:
        """The priority that a request gets; one that says nothing (0) the highest that it may have, at most 0.

        Raises PermissionDenied.
        """
        highest = self.highest_priority
        if highest is None or asked >= highest:
            return asked
        if asked == 0:
            return highest
        raise PermissionDenied(
            f"priority is {asked}; token {self.name!r} may have {highest} and above (lower is first)"
        )

    def may_use(self, adapter: str) -> bool:
        """Whether its requests may run with this adapter. One that may not be used looks like one that is not there."""
        return self.adapters is None or adapter in self.adapters

    def check_administers(self) -> None:
        """Raises PermissionDenied."""
        if not self.may_administer:
            raise PermissionDenied(f"token {self.name!r} may not use AdminService; use one with `admin: true`")

    def salted(self, cache_salt: str) -> str | None:
        """The cache_salt of a request at the engines: no tenant's is ever another's. None: it needs none."""
        # A tenant's name has no slash.
        return f"{self.tenant}/{cache_salt}" if self.tenant else cache_salt or None


ANYBODY: Final = Caller(may_administer=True)
"""The caller in a cluster without tokens: it has no limits and no tenants."""

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def current_caller() -> Caller:
    """The caller whose call the current task works on; ANYBODY outside of calls."""
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Set the caller for the rest of this task, and for tasks that it starts; each call needs a task of its own."""
    _caller.set(caller)


@contextmanager
def calling_as(caller: Caller) -> Iterator[None]:
    """Inside, current_caller() is this one."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)
