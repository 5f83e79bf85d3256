"""RAY: calls actors, tasks and Ray's head, and turns every failure of Ray into RayCallFailed.

Ray reports a failed call by some forty exception classes; several are plain RayErrors, which a handler of an actor's
death would not catch. Here each of them becomes a RayCallFailed with its kind. No other module imports ray.exceptions;
ruff refuses it. Calls have deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final, ParamSpec, TypeVar

import ray
from ray import exceptions

_P = ParamSpec("_P")
_T = TypeVar("_T")


class FailureKind(StrEnum):
    """Why a call failed."""

    DIED = "died"
    """The actor's process, or its node, has ended."""
    UNAVAILABLE = "unavailable"
    """The actor cannot be reached at the moment; the method may or may not have run."""
    UNSCHEDULABLE = "unschedulable"
    """Ray has no node for the actor, or its placement group is gone."""
    ENVIRONMENT = "environment"
    """Ray could not set up the actor's runtime environment."""
    RAISED = "raised"
    """The method raised; RayCallFailed.cause is its exception."""
    TIMED_OUT = "timed out"
    NOT_FOUND = "not found"
    """No actor, or no placement group, has the name."""
    ANSWER_LOST = "answer lost"
    """The method may have run; its answer is lost, or Ray's object store had no room for it."""
    CANCELLED = "cancelled"
    RAY = "ray"
    """Ray itself failed in another way."""


class RayCallFailed(Exception):
    """A call through Ray gave no answer.

    reason: why, in words
    cause:  the exception that the method raised; None unless kind is RAISED
    """

    def __init__(self, kind: FailureKind, reason: str, cause: BaseException | None = None) -> None:
        super().__init__(kind, reason, cause)
        self.kind = kind
        self.reason = reason
        self.cause = cause

    def __str__(self) -> str:
        return self.reason

    @property
    def is_silence(self) -> bool:
        """Whether the actor may be well all the same, and answer the next call."""
        return self.kind in {FailureKind.TIMED_OUT, FailureKind.UNAVAILABLE}


async def call(method: Any, *arguments: Any, timeout_s: float, **options: Any) -> Any:
    """Call a method of an actor and await its answer. Raises RayCallFailed.

    method:  a method of Ray's handle of the actor, such as `actor.health`
    options: keyword arguments of the method
    """
    with ray_failures(timeout_s):
        async with asyncio.timeout(timeout_s):
            return await method.remote(*arguments, **options)


def call_blocking(method: Any, *arguments: Any, timeout_s: float, **options: Any) -> Any:
    """Do the same as call() on a thread without an event loop. Raises RayCallFailed."""
    with ray_failures(timeout_s):
        return ray.get(method.remote(*arguments, **options), timeout=timeout_s)


def result_of(reference: Any, *, timeout_s: float) -> Any:
    """Wait for the answer of a call, or of a task, that has begun. Raises RayCallFailed."""
    with ray_failures(timeout_s):
        return ray.get(reference, timeout=timeout_s)


async def ask_head(function: Callable[_P, _T], /, *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Call a function that asks Ray's head, such as ray.nodes or ray.get_actor, on a thread. Raises RayCallFailed.

    An answer that comes after 10 s is dropped; the thread waits for it.
    """
    with ray_failures(_HEAD_TIMEOUT_S):
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            return await on_thread(function, *arguments, **options)


async def on_thread(function: Callable[_P, _T], /, *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Do the same as ask_head() without a deadline, for functions whose end has to be awaited. Raises RayCallFailed."""
    with ray_failures():
        try:
            return await asyncio.to_thread(function, *arguments, **options)
        except exceptions.RayError:
            raise
        except ValueError as error:
            # Ray raises ValueError for a name that it does not know.
            raise RayCallFailed(FailureKind.NOT_FOUND, str(error)) from error
        except (RuntimeError, ConnectionError) as error:
            raise RayCallFailed(FailureKind.UNAVAILABLE, str(error)) from error


@contextmanager
def ray_failures(timeout_s: float | None = None) -> Iterator[None]:
    """Raise RayCallFailed in place of exceptions of Ray and of TimeoutError.

    timeout_s: the deadline of the call, for the message
    """
    try:
        yield
    except (exceptions.RayError, TimeoutError) as error:
        kind = kind_of(type(error))
        if kind is FailureKind.TIMED_OUT:
            limit = "" if timeout_s is None else f" within {timeout_s:g} s"
            raise RayCallFailed(kind, f"no answer{limit}") from error
        cause = error.cause if isinstance(error, exceptions.RayTaskError) else None
        raise RayCallFailed(kind, _reason(error), cause) from error


def kind_of(error: type[BaseException]) -> FailureKind:
    """Return the kind of failure that a class of exceptions means."""
    # Ray derives a class from RayTaskError and the class that a method raised; RayTaskError is first in its MRO.
    return next((_KINDS[base] for base in error.__mro__ if base in _KINDS), FailureKind.RAY)


_HEAD_TIMEOUT_S: Final = 10.0
_KINDS: Final[Mapping[type[BaseException], FailureKind]] = {
    exceptions.RayTaskError: FailureKind.RAISED,
    exceptions.UserCodeException: FailureKind.RAISED,
    exceptions.CrossLanguageError: FailureKind.RAISED,
    exceptions.UnserializableException: FailureKind.RAISED,
    exceptions.RayActorError: FailureKind.DIED,
    exceptions.WorkerCrashedError: FailureKind.DIED,
    exceptions.NodeDiedError: FailureKind.DIED,
    exceptions.LocalRayletDiedError: FailureKind.DIED,
    exceptions.AsyncioActorExit: FailureKind.DIED,
    exceptions.OutOfMemoryError: FailureKind.DIED,
    exceptions.ActorUnavailableError: FailureKind.UNAVAILABLE,
    exceptions.PendingCallsLimitExceeded: FailureKind.UNAVAILABLE,
    exceptions.RpcError: FailureKind.UNAVAILABLE,
    exceptions.ActorUnschedulableError: FailureKind.UNSCHEDULABLE,
    exceptions.TaskUnschedulableError: FailureKind.UNSCHEDULABLE,
    exceptions.ActorPlacementGroupRemoved: FailureKind.UNSCHEDULABLE,
    exceptions.TaskPlacementGroupRemoved: FailureKind.UNSCHEDULABLE,
    exceptions.RuntimeEnvSetupError: FailureKind.ENVIRONMENT,
    exceptions.GetTimeoutError: FailureKind.TIMED_OUT,
    exceptions.RayChannelTimeoutError: FailureKind.TIMED_OUT,
    TimeoutError: FailureKind.TIMED_OUT,
    exceptions.ActorHandleNotFoundError: FailureKind.NOT_FOUND,
    exceptions.ObjectLostError: FailureKind.ANSWER_LOST,
    exceptions.PlasmaObjectNotAvailable: FailureKind.ANSWER_LOST,
    exceptions.ObjectStoreFullError: FailureKind.ANSWER_LOST,
    exceptions.OutOfDiskError: FailureKind.ANSWER_LOST,
    exceptions.TaskCancelledError: FailureKind.CANCELLED,
    exceptions.RayError: FailureKind.RAY,
}
"""The kind of failure of each class of exceptions; a class that is missing has the kind of its nearest base."""


def _reason(error: BaseException) -> str:
    """Return the message of the error's cause, without Ray's traceback."""
    cause = error.cause if isinstance(error, exceptions.RayTaskError) else error
    text = str(cause).strip() or type(cause).__name__
    if not isinstance(error, exceptions.RayActorError):
        return text
    # After this sentence, Ray lists possible causes.
    return text.splitlines()[-1].strip().partition(" Some common causes")[0]
