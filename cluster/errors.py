"""Defines the errors of the cluster floor, as a request's client or the cluster's operator sees them.

ClusterError
|-- InvalidRequest        the request has mistakes; the error names fields, their values, and what is allowed
|-- ModelNotFound         this cluster does not serve the model that the request names
|-- AdapterNotFound       this cluster does not serve the LoRA adapter that the request names
|-- Unauthenticated       the call has no token, or an unknown one
|-- PermissionDenied      the call's token does not allow the call
|-- Overloaded            the queue is full: try again after a delay
|   `-- AllowanceSpent    the call's token is at one of its own limits
|-- ReaderTooSlow         the client did not read its stream
|-- DeadlineExceeded      the client's deadline passed before the request was finished
|   `-- DeadlineUnreachable  the request was refused at once: its first token would come after the deadline
|-- NoEngineAvailable     no engine serves
|-- ModelVersionLeft      the model version that the request began on has no engines any more
|-- Draining              this ingress takes no new requests
|-- EngineFailed          the request was admitted, and an engine could not finish it
|   `-- OutputsDiverged   two engines disagree on the same position of a request's output
|-- EngineLost            the session with an engine broke; no more outputs come from it
|-- ControllerUnavailable the controller does not answer; operators' changes wait for it
|-- UnknownEngine         no engine of that name serves
|-- EngineRefused         an engine could not do what an operator asked of it
|-- UnknownNode           no node, or more than one, has that name
|-- RecordNotFound        no ingress has a record of the request, or not one for the caller to see
|-- RecordsAreOff         the ingresses keep no records of requests
|-- SecretIsInFile        the cluster's secret is replaced in its file, not by an operator's call
|-- NotDoneInTime         a change goes on, but was not finished within the operator's time limit
|-- InstallFailed         a package could not be installed, or cannot be used on this machine
|-- TokenizerUnusable     the model's tokenizer cannot be used; the ingress does not start
|-- AddressUnavailable    the ingress cannot listen at its address
|-- DecisionsDiffer       a replay has decided otherwise than what was recorded
|-- CannotMeasure         a benchmark cannot be run, since a server does not answer as it has to
|-- InvalidConfig         the settings have mistakes; the error names settings, their values, and what is allowed
`-- CannotStart           the cluster could not be started
    |-- CannotPlace       the Ray cluster has no room for an engine
    `-- CanaryFailed      an engine or a pair did not answer its canary request as it should
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from cluster.api.protos.shared_errors import ClusterError as ClusterError
from cluster.api.protos.shared_errors import InvalidConfig as InvalidConfig


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of a request whose value is not allowed.

    field:   the field's path in the request, such as "sampling_params.top_p"
    value:   the value, in words if it is long or missing
    allowed: the allowed values, in words
    """

    field: str
    value: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.field} is {self.value}; allowed: {self.allowed}"


class InvalidRequest(ClusterError):
    """The request cannot be served by any engine as it is: do not retry it unchanged."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(str(violation) for violation in violations))
        self.violations = violations


class ModelNotFound(ClusterError):
    """The request names a model that is not served here."""

    def __init__(self, model: str, served_model: str) -> None:
        super().__init__(f"model {model!r} is not served here; leave model empty or ask for {served_model!r}")
        self.model = model


class Unauthenticated(ClusterError):
    """The call has no token, or one that the cluster does not know."""


class PermissionDenied(ClusterError):
    """The call's token is known, but does not allow the call."""


class AdapterNotFound(ClusterError):
    """The request names a LoRA adapter that is not served here."""

    def __init__(self, field: str, name: str, known: list[str], *, is_enabled: bool) -> None:
        """field: the request's field that names the adapter; is_enabled: whether the cluster serves adapters at all"""
        allowed = f"one of the registered adapters: {', '.join(known) or 'none so far'}"
        if not is_enabled:
            allowed = "none: this cluster serves no adapters (its setting lora is not set)"
        self.violations = (FieldViolation(field, repr(name), allowed),)
        super().__init__(str(self.violations[0]))


class OverloadLimit(StrEnum):
    """The limit that a refused request would have exceeded."""

    REQUESTS = "requests"
    """The requests in flight."""
    WAITING_TOKENS = "waiting_tokens"
    """The tokens of prompts that wait."""
    MEMORY = "memory"
    """The memory for bodies of requests, or for images."""


class Overloaded(ClusterError):
    """Too many requests are in flight, or too many tokens wait. retry_delay_s: when to try again"""

    def __init__(self, reason: str, retry_delay_s: float, *, limit: OverloadLimit = OverloadLimit.MEMORY) -> None:
        super().__init__(f"{reason}; retry in {retry_delay_s:.3g} s")
        self.retry_delay_s = retry_delay_s
        self.limit = limit


class AllowanceSpent(Overloaded):
    """The call's token has reached one of its own limits; clients with other tokens are still served."""

    def __init__(self, who: str, limit: str, retry_delay_s: float) -> None:
        super().__init__(f"token {who!r} is at its limit of {limit}", retry_delay_s)


class ReaderTooSlow(ClusterError):
    """The client has not read its stream. It can resume the request from the tokens that it has."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"nothing of the stream was read for {timeout_s:g} s; resume with output_token_ids")


class DeadlineExceeded(ClusterError):
    """The client's deadline passed; the request was aborted on its engines."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"{request_id}: the request's deadline passed before the request was finished")


class DeadlineUnreachable(DeadlineExceeded):
    """The requests ahead take longer than the client will wait. No engine has seen the request."""

    def __init__(self, time_left_s: float, expected_s: float) -> None:
        ClusterError.__init__(
            self,
            f"the deadline is in {time_left_s:.3g} s, and the first token is expected in {expected_s:.3g} s at the "
            "earliest; give the request more time, or try again when fewer requests wait",
        )


class NoEngineAvailable(ClusterError):
    """No engine serves, or none that could do what was asked. A suitable engine may become ready a moment later."""

    def __init__(self, what: str = "serves") -> None:
        """what: completes the sentence that begins with "no engine", such as "computes prompts", for the message"""
        super().__init__(f"no engine {what}; retry when one is ready")


class ModelVersionLeft(ClusterError):
    """The request's model version was updated away; engines of another version must not go on with its output."""

    def __init__(self, version: int) -> None:
        super().__init__(f"its model version {version} has left the cluster")


class Draining(ClusterError):
    """This ingress is about to close. Another ingress, or this address a little later, will take the request."""

    def __init__(self) -> None:
        super().__init__(
            "this ingress is draining and takes no new requests; retry, at another ingress if there is one"
        )


class EngineFailed(ClusterError):
    """An engine could not finish an admitted request.

    num_new_tokens: how many output tokens the client has received in answer to this request
    can_resume:     whether the engine was the cause and not the request, so that another engine can go on
    """

    def __init__(self, request_id: str, reason: str, *, num_new_tokens: int, can_resume: bool) -> None:
        super().__init__(f"{request_id}: {reason}")
        self.request_id = request_id
        self.reason = reason
        self.num_new_tokens = num_new_tokens
        self.can_resume = can_resume

    def with_num_new_tokens(self, num_new_tokens: int) -> Self:
        """Return the same error with another number of tokens."""
        return type(self)(self.request_id, self.reason, num_new_tokens=num_new_tokens, can_resume=self.can_resume)


class OutputsDiverged(EngineFailed):
    """An engine sent a token that differs from the one that the client already has at that position."""


class EngineLost(ClusterError):
    """The session with an engine broke.

    has_left:    whether the engine was drained and has left the membership
    is_silent:   whether the engine may still run, but sent nothing for too long
    had_request: whether the engine had acknowledged the request that this error ends
    """

    def __init__(
        self,
        engine_id: str,
        reason: str,
        *,
        has_left: bool = False,
        is_silent: bool = False,
        had_request: bool = True,
    ) -> None:
        super().__init__(f"engine {engine_id} is lost: {reason}")
        self.engine_id = engine_id
        self.has_left = has_left
        self.is_silent = is_silent
        self.had_request = had_request

    def of_request(self, *, had_request: bool) -> EngineLost:
        """Return a copy of the error for one of the requests that it ends."""
        error = copy(self)
        error.had_request = had_request
        return error


class ControllerUnavailable(ClusterError):
    """The controller does not answer. Engines and ingresses go on serving; operators' changes wait for it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the controller does not answer: {reason}")


class UnknownEngine(ClusterError):
    """No engine of that name serves."""

    def __init__(self, engine_id: str, serving: list[str]) -> None:
        super().__init__(f"no engine {engine_id!r} serves; these do: {', '.join(serving) or 'none'}")


class EngineRefused(ClusterError):
    """An engine could not do what an operator asked of it, or cannot do it now."""

    def __init__(self, engine_id: str, reason: str) -> None:
        super().__init__(f"engine {engine_id}: {reason}")


class UnknownNode(ClusterError):
    """No node, or more than one, has that name."""

    def __init__(self, name: str, nodes: list[str]) -> None:
        super().__init__(f"{name!r} does not name one node of the Ray cluster; its nodes are: {', '.join(nodes)}")


class RecordNotFound(ClusterError):
    """No ingress that answered has a record of the request that the caller may see.

    The message is the same whether the id is unknown, the record is no longer kept, or the request is another tenant's.
    """

    def __init__(self, request_id: str, kept: str, unanswered: list[str]) -> None:
        """kept: for how many requests records are kept; unanswered: which ingresses did not answer, each with why"""
        missing = (
            f". The record may be at an ingress that did not answer: {'; '.join(unanswered)}" if unanswered else ""
        )
        super().__init__(
            f"no record of request {request_id!r}: check the id, and ask soon after the request. {kept}; a request "
            f"that no engine got leaves none, and an ingress that was restarted has none from before{missing}"
        )


class RecordsAreOff(ClusterError):
    """The ingresses keep no records of requests."""

    def __init__(self) -> None:
        super().__init__(
            "this cluster keeps no records of requests: ingress.max_request_records is 0; set it to the number of "
            "requests that can be explained, and start the cluster again"
        )


class InstallFailed(ClusterError):
    """A package could not be installed, or cannot be used on this machine; the message says why."""


class SecretIsInFile(ClusterError):
    """The cluster's secret comes from a file, so it has to be replaced in the file."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the cluster's secret is in cluster_secret_file, {path}: write a new secret above the old one on every "
            "node, and remove the old one once every node has both; raypd follows the file"
        )


class NotDoneInTime(ClusterError):
    """An operator's change goes on, but was not finished within the time limit."""

    def __init__(self, what: str, wait_s: float, missing: str = "") -> None:
        """what: the change; wait_s: the time limit; missing: what the change still waits for, in words"""
        waits = f", and waits for {missing}" if missing else ""
        super().__init__(f"{what} was not done within {wait_s:g} s; it goes on{waits}: see `raypd status`")


class TokenizerUnusable(ClusterError):
    """The model's tokenizer cannot be used; the message says why."""


class AddressUnavailable(ClusterError):
    """The ingress cannot listen at its address."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen at {address}: {reason}; free the port or choose another (0 for any)")
        self.address = address


class CannotMeasure(ClusterError):
    """A benchmark cannot be run; the message says which call failed, and what the server answered."""


class CannotStart(ClusterError):
    """The cluster could not be started; the message says which part failed, and why."""


class CannotPlace(CannotStart):
    """The Ray cluster has too few free resources for an engine; the message says which."""


class CanaryFailed(CannotStart):
    """An engine, or a pair of engines, did not answer its canary request as it should."""


class DecisionsDiffer(ClusterError):
    """Replayed schedulers or routers have decided otherwise than the recorded ones. differences: the first of each"""

    def __init__(self, differences: list[str]) -> None:
        super().__init__("; ".join(differences))
