"""The errors of calls to an ingress, as their caller sees them.

ClusterError
    InvalidConfig       the credentials cannot be used
    CallFailed          a call failed
        ClientClosed    the client was closed while the call was under way
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # it ships no types

from cluster.api.protos.shared_errors import STATUS_DETAILS_KEY, ClusterError

_PASSING: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED})
"""Codes of failures that may pass. CANCELLED comes from a server that ends; a caller that cancels gets no error."""


class CallFailed(ClusterError):
    """A call to an ingress failed.

    code:          gRPC's status code
    violations:    for each field of the request that is wrong, what is wrong with it
    retry_delay_s: seconds after which to try again; None if the ingress named no delay
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: dict[str, str] | None = None,
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.violations = violations or {}
        self.retry_delay_s = retry_delay_s

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed at another ingress, or later: the request itself is not at fault."""
        return self.code in _PASSING or self.retry_delay_s is not None


class ClientClosed(CallFailed):
    """The client was closed while the call was under way."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.CANCELLED, "the client was closed")

    @property
    def is_passing(self) -> bool:
        """Always False: a closed client makes no further calls."""
        return False


@contextmanager
def as_call_failed() -> Iterator[None]:
    """Raise the errors of gRPC calls in this context as CallFailed, with the details that the ingress sent."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _call_failed(error) from error
    except asyncio.CancelledError:
        # gRPC also raises CancelledError when a channel is closed under its calls; then nobody cancelled this task.
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise ClientClosed from None
        raise


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group, however deep it is."""
    first = failures.exceptions[0]
    return first_failure(first) if isinstance(first, BaseExceptionGroup) else first


def _call_failed(error: grpc.aio.AioRpcError) -> CallFailed:
    violations: dict[str, str] = {}
    retry_delay_s = None
    for detail in _details(error):
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violations = {violation.field: violation.description for violation in bad_request.field_violations}
        elif detail.Unpack(retry_info):
            retry_delay_s = retry_info.retry_delay.ToMilliseconds() / 1000
    return CallFailed(error.code(), error.details() or "no message", violations, retry_delay_s)


def _details(error: grpc.aio.AioRpcError) -> Sequence[Any]:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
            return list(status.details)
    return ()
