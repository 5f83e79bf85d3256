"""Converts errors to gRPC statuses, with the details that clients act on (google.rpc.BadRequest, RetryInfo)."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # it ships no types

from cluster.api.protos.shared_errors import STATUS_DETAILS_KEY
from cluster.errors import (
    AdapterNotFound,
    ClusterError,
    ControllerUnavailable,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    EngineRefused,
    InvalidConfig,
    InvalidRequest,
    ModelNotFound,
    NoEngineAvailable,
    Overloaded,
    PermissionDenied,
    ReaderTooSlow,
    RecordNotFound,
    RecordsAreOff,
    SecretIsInFile,
    Unauthenticated,
    UnknownEngine,
    UnknownNode,
)


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """The status with which a call ends."""

    code: grpc.StatusCode
    message: str
    details: tuple[Message, ...] = ()

    @property
    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The details in the metadata where gRPC's client libraries expect them."""
        if not self.details:
            return ()
        number: int = self.code.value[0]
        status = status_pb2.Status(code=number, message=self.message)
        for detail in self.details:
            status.details.add().Pack(detail)
        return ((STATUS_DETAILS_KEY, status.SerializeToString()),)


def status_of(error: ClusterError) -> ErrorStatus:
    """Return the status of an error. Only UNAVAILABLE and RESOURCE_EXHAUSTED are safe to retry unchanged."""
    code, message = grpc.StatusCode, str(error)
    match error:
        case InvalidRequest():
            return ErrorStatus(code.INVALID_ARGUMENT, message, (_bad_request(error),))
        case InvalidConfig():
            return ErrorStatus(code.INVALID_ARGUMENT, message)
        case AdapterNotFound():
            return ErrorStatus(code.NOT_FOUND, message, (_bad_request(error),))
        case ModelNotFound() | UnknownEngine() | UnknownNode() | RecordNotFound():
            return ErrorStatus(code.NOT_FOUND, message)
        case EngineRefused() | SecretIsInFile() | RecordsAreOff():
            return ErrorStatus(code.FAILED_PRECONDITION, message)
        case Unauthenticated():
            return ErrorStatus(code.UNAUTHENTICATED, message)
        case PermissionDenied():
            return ErrorStatus(code.PERMISSION_DENIED, message)
        case ReaderTooSlow():
            return ErrorStatus(code.ABORTED, message)
        case Overloaded():
            return ErrorStatus(code.RESOURCE_EXHAUSTED, message, (_retry_info(error.retry_delay_s),))
        case NoEngineAvailable() | Draining() | ControllerUnavailable():
            return ErrorStatus(code.UNAVAILABLE, message)
        case DeadlineExceeded():
            return ErrorStatus(code.DEADLINE_EXCEEDED, message)
        case EngineFailed(can_resume=True, num_new_tokens=num_new_tokens):
            # Once tokens were sent, a plain retry would send them again: the client has to resume instead.
            return ErrorStatus(code.ABORTED if num_new_tokens else code.UNAVAILABLE, message)
        case _:
            return ErrorStatus(code.INTERNAL, message)


def internal_error(request_id: str) -> ErrorStatus:
    """Return the status of a call that a bug of raypd failed; the log has the error under the request's id."""
    return ErrorStatus(grpc.StatusCode.INTERNAL, f"{request_id}: internal error; the server's log has it by this id")


def _bad_request(error: InvalidRequest | AdapterNotFound) -> error_details_pb2.BadRequest:
    message = error_details_pb2.BadRequest()
    for violation in error.violations:
        message.field_violations.add(field=violation.field, description=str(violation))
    return message


def _retry_info(delay_s: float) -> error_details_pb2.RetryInfo:
    message = error_details_pb2.RetryInfo()
    message.retry_delay.FromMilliseconds(int(delay_s * 1000))
    return message
