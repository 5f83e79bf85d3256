"""Converts errors to answers as OpenAI's clients know them: HTTP status, body, and when to try again."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from cluster.api.http.responses import ErrorBody, ErrorDetail
from cluster.errors import (
    AdapterNotFound,
    AllowanceSpent,
    ClusterError,
    ControllerUnavailable,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    EngineRefused,
    FieldViolation,
    InvalidRequest,
    ModelNotFound,
    NoEngineAvailable,
    Overloaded,
    PermissionDenied,
    RecordNotFound,
    Unauthenticated,
)

_RETRY_DELAY_S: Final = 1.0
"""The delay named to clients while no engine serves: engines take seconds to come back."""
_MAX_MISTAKES: Final = 4
_MAX_LISTED: Final = 64
_FIELD: Final = re.compile("[a-z0-9_]+")
_KINDS: Final = ("str", "int", "float", "bool")


@dataclass(frozen=True, slots=True)
class HttpError:
    """The answer to a call that fails."""

    status: int
    detail: ErrorDetail
    retry_delay_s: float | None = None

    @property
    def body(self) -> bytes:
        """The answer's body, as JSON."""
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self) -> Response:
        """Return the whole answer."""
        headers = {} if self.status != 401 else {"www-authenticate": "Bearer"}
        if self.status == 504:
            # OpenAI's client retries a 504 by default, though the call has no time left.
            headers["x-should-retry"] = "false"
        if self.retry_delay_s is not None:
            # OpenAI's client reads retry-after-ms; other clients read the standard header retry-after.
            headers["retry-after"] = str(max(1, math.ceil(self.retry_delay_s)))
            headers["retry-after-ms"] = str(max(1, math.ceil(self.retry_delay_s * 1000)))
        return Response(self.body, self.status, headers, "application/json")


def error_of(error: ClusterError) -> HttpError:
    """Return the answer to a call that failed with an error. Calls answered 429 or 503 may be retried unchanged."""
    message = str(error)
    match error:
        case InvalidRequest():
            param = error.violations[0].field if error.violations else None
            return HttpError(400, ErrorDetail(message, "invalid_request_error", param, "invalid_value"))
        case AdapterNotFound():
            return HttpError(404, ErrorDetail(message, "invalid_request_error", "model", "adapter_not_found"))
        case EngineRefused():
            return HttpError(400, ErrorDetail(message, "invalid_request_error", None, "refused"))
        case RecordNotFound():
            return HttpError(404, ErrorDetail(message, "invalid_request_error", "request_id", "record_not_found"))
        case ModelNotFound():
            return HttpError(404, ErrorDetail(message, "invalid_request_error", "model", "model_not_found"))
        case Unauthenticated():
            return HttpError(401, ErrorDetail(message, "invalid_request_error", None, "invalid_api_key"))
        case PermissionDenied():
            return HttpError(403, ErrorDetail(message, "permission_error", None, "permission_denied"))
        case Overloaded():
            code = "rate_limit_exceeded" if isinstance(error, AllowanceSpent) else "overloaded"
            return HttpError(429, ErrorDetail(message, "rate_limit_error", None, code), error.retry_delay_s)
        case NoEngineAvailable() | Draining() | ControllerUnavailable():
            return HttpError(503, ErrorDetail(message, "server_error", None, "unavailable"), _RETRY_DELAY_S)
        case DeadlineExceeded():
            return HttpError(504, ErrorDetail(message, "server_error", None, "deadline_exceeded"))
        case EngineFailed(can_resume=True, num_new_tokens=0):
            return HttpError(503, ErrorDetail(message, "server_error", None, "engine_failed"), _RETRY_DELAY_S)
        case EngineFailed():
            return HttpError(500, ErrorDetail(message, "server_error", None, "engine_failed"))
        case _:
            return HttpError(500, ErrorDetail(message, "server_error", None, "internal_error"))


def internal_error(request_id: str) -> HttpError:
    """Return the answer to a call that a bug of raypd failed; the log has the error under the request's id."""
    message = f"{request_id}: internal error; the server's log has it by this id"
    return HttpError(500, ErrorDetail(message, "server_error", None, "internal_error"))


def refused(status: int, message: str, code: str) -> HttpError:
    """Return the answer to a call that is refused before any of the API's methods is called."""
    return HttpError(status, ErrorDetail(message, "invalid_request_error", None, code))


def malformed(error: ValidationError) -> InvalidRequest:
    """Return the error of a body that does not have the form of its request."""
    if (num_mistakes := error.error_count()) > _MAX_LISTED:
        # A list of all mistakes would take too long to make.
        return InvalidRequest(FieldViolation("body", f"wrong in {num_mistakes} places", "what /openapi.json describes"))
    violations = []
    for mistake in error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_MISTAKES]:
        field = _field_at(mistake["loc"]) or "body"
        match mistake["type"]:
            case "extra_forbidden":
                violations.append(FieldViolation(field, "given", "this server has no such parameter; leave it out"))
            case "missing":
                violations.append(FieldViolation(field, "missing", "it is required"))
            case "model_type":
                violations.append(FieldViolation(field, "of another kind", "an object"))
            case _:
                violations.append(FieldViolation(field, "of another kind", mistake["msg"]))
    # Pydantic lists the mistakes for each type that a value may have. Only those of the type that fits best are
    # reported.
    fields = [violation.field for violation in violations]
    meant = [
        one for one in violations if not any(field.startswith((f"{one.field}.", f"{one.field}[")) for field in fields)
    ]
    return InvalidRequest(*meant)


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return the same error with the fields' names over HTTP. names: from Serving's names, where the two differ"""

    def rename(violation: FieldViolation) -> FieldViolation:
        field = violation.field.removeprefix("sampling_params.")
        if field.startswith("chat."):
            field = field.removeprefix("chat.").replace(".parts[", ".content[").replace("].image", "].image_url")
        return FieldViolation(names.get(field, field), violation.value, violation.allowed)

    return InvalidRequest(*map(rename, error.violations))


def _field_at(location: tuple[int | str, ...]) -> str:
    """Return a field's path as people write it; Pydantic's location also names the types that were tried."""
    if not location:
        return ""
    *before, last = location
    steps = [*(part for part in before if isinstance(part, int) or _is_field(part)), last]
    if len(steps) > 1 and isinstance(last, str) and not _is_field(last):
        steps.pop()
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _is_field(part: str) -> bool:
    return part not in _KINDS and _FIELD.fullmatch(part) is not None
