"""Every exception that Ray has becomes one, with its kind and in words."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from typing import Any

import pytest
import ray
from ray import exceptions
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError, RuntimeEnvSetupError

from actors.process.ray_calls import FailureKind, RayCallFailed, ask_head, call, call_blocking, kind_of, result_of

RPC_ERROR = exceptions.RpcError("deadline exceeded")  # type: ignore[no-untyped-call]  # ray
KINDS = {
    FailureKind.RAISED: {"RayTaskError", "UserCodeException", "CrossLanguageError", "UnserializableException"},
    FailureKind.DIED: {
        "RayActorError",
        "ActorDiedError",
        "AsyncioActorExit",
        "WorkerCrashedError",
        "NodeDiedError",
        "LocalRayletDiedError",
        "OutOfMemoryError",
    },
    FailureKind.UNAVAILABLE: {"ActorUnavailableError", "PendingCallsLimitExceeded", "RpcError"},
    FailureKind.UNSCHEDULABLE: {
        "ActorUnschedulableError",
        "TaskUnschedulableError",
        "ActorPlacementGroupRemoved",
        "TaskPlacementGroupRemoved",
    },
    FailureKind.ENVIRONMENT: {"RuntimeEnvSetupError"},
    FailureKind.TIMED_OUT: {"GetTimeoutError", "RayChannelTimeoutError"},
    FailureKind.NOT_FOUND: {"ActorHandleNotFoundError"},
    FailureKind.ANSWER_LOST: {
        "ObjectLostError",
        "ObjectFetchTimedOutError",
        "ObjectFreedError",
        "ObjectReconstructionFailedError",
        "OwnerDiedError",
        "ReferenceCountingAssertionError",
        "PlasmaObjectNotAvailable",
        "ObjectStoreFullError",
        "OutOfDiskError",
    },
    FailureKind.CANCELLED: {"TaskCancelledError"},
    FailureKind.RAY: {
        "RayError",
        "RaySystemError",
        "ActorAlreadyExistsError",
        "AuthenticationError",
        "ObjectRefStreamEndOfStreamError",
        "OufOfBandObjectRefSerializationException",
        "RayCgraphCapacityExceeded",
        "RayChannelError",
        "RayDirectTransportError",
        "StreamingGeneratorReplayInconsistentError",
    },
}


def rays_exceptions() -> dict[str, type[BaseException]]:
    classes = inspect.getmembers(exceptions, inspect.isclass)
    return {name: one for name, one in classes if issubclass(one, exceptions.RayError)}


def test_each_class_of_exception_that_this_ray_has_is_one_of_a_kind() -> None:
    assert {name: kind_of(one) for name, one in rays_exceptions().items()} == {
        name: kind for kind, names in KINDS.items() for name in names
    }


class Method:
    """An actor's method, as its handle has it."""

    def __init__(self, error: BaseException | None = None, answer: object = None) -> None:
        self._error = error
        self._answer = answer

    def remote(self, *arguments: object, **options: object) -> Any:
        return self._work(*arguments, **options)

    async def _work(self, *arguments: object, **options: object) -> object:
        if self._error is not None:
            raise self._error
        if self._answer is None:
            await asyncio.Event().wait()
        return self._answer, arguments, options


async def failure_of(error: BaseException) -> RayCallFailed:
    with pytest.raises(RayCallFailed) as raised:
        await call(Method(error), timeout_s=10)
    assert raised.value.__cause__ is error
    return raised.value


async def test_an_answer_comes_through_with_the_arguments_of_the_call() -> None:
    assert await call(Method(answer=7), "a", timeout_s=10, flag=True) == (7, ("a",), {"flag": True})


async def test_what_the_method_raised_is_the_cause_in_its_own_words() -> None:
    cause = ValueError("no such checkpoint")
    failed = await failure_of(RayTaskError("start", "", cause).as_instanceof_cause())  # type: ignore[no-untyped-call]  # ray
    assert (failed.kind, failed.reason, failed.cause) == (FailureKind.RAISED, "no such checkpoint", cause)


async def test_a_timeout_that_the_method_raised_is_not_the_calls_own() -> None:
    cause = TimeoutError("the peer is silent")
    failed = await failure_of(RayTaskError("start", "", cause).as_instanceof_cause())  # type: ignore[no-untyped-call]  # ray
    assert (failed.kind, failed.reason) == (FailureKind.RAISED, "the peer is silent")


async def test_an_actor_that_met_a_dead_one_is_not_dead_itself() -> None:
    failed = await failure_of(RayTaskError("status", "", ActorDiedError()).as_instanceof_cause())  # type: ignore[no-untyped-call]  # ray
    assert failed.kind is FailureKind.RAISED


class NodeDied(ActorDiedError):
    def __str__(self) -> str:
        return "The actor died because its node has died. Node Id: ab\n\tthe actor's node was terminated unexpectedly"


async def test_the_death_of_a_node_is_told_in_rays_last_line_without_its_indentation() -> None:
    failed = await failure_of(NodeDied())
    assert (failed.kind, str(failed)) == (FailureKind.DIED, "the actor's node was terminated unexpectedly")


async def test_what_ray_raises_as_a_plain_error_has_its_kind_too() -> None:
    failed = await failure_of(RuntimeEnvSetupError("no such package"))
    assert failed.kind is FailureKind.ENVIRONMENT
    assert "no such package" in str(failed)
    assert not failed.is_silence


async def test_a_call_has_a_deadline() -> None:
    with pytest.raises(RayCallFailed, match=r"no answer within 0\.01 s") as raised:
        await call(Method(), timeout_s=0.01)
    assert raised.value.is_silence


def test_a_blocking_call_fails_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: Any, timeout: float) -> object:
        raise GetTimeoutError("Get timed out")

    monkeypatch.setattr(ray, "get", get)
    method = Method()
    method.remote = lambda *arguments, **options: "reference"  # type: ignore[method-assign]  # nothing is to be awaited
    with pytest.raises(RayCallFailed, match="no answer within 3 s"):
        call_blocking(method, timeout_s=3)
    with pytest.raises(RayCallFailed, match="no answer within 3 s"):
        result_of("reference", timeout_s=3)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("Failed to look up actor"), FailureKind.NOT_FOUND),
        (RuntimeError("Failed to get from the store"), FailureKind.UNAVAILABLE),
        (ConnectionError("refused"), FailureKind.UNAVAILABLE),
        (RPC_ERROR, FailureKind.UNAVAILABLE),
    ],
)
async def test_what_rays_head_is_asked_fails_the_same_way(error: Exception, kind: FailureKind) -> None:
    def ask(name: str) -> None:
        raise error

    with pytest.raises(RayCallFailed) as raised:
        await ask_head(ask, "a name")
    assert raised.value.kind is kind


def test_a_failed_call_can_be_told_to_another_process() -> None:
    failed = RayCallFailed(FailureKind.RAISED, "in words", ValueError("its cause"))
    told = pickle.loads(pickle.dumps(failed))
    assert (told.kind, told.reason, repr(told.cause)) == (FailureKind.RAISED, "in words", "ValueError('its cause')")
