"""Everything that can go wrong on this floor, as a request's client or the cluster's operator is told.

ClusterError
|-- InvalidRequest        the client's mistake: which fields, their values, what is allowed
|-- ModelNotFound         no such model here
|-- AdapterNotFound       no such LoRA adapter here
|-- Unauthenticated       the call has no token, or one that is not known
|-- PermissionDenied      the call's token does not allow it
|-- Overloaded            the queue is full: try again after a delay
|   `-- AllowanceSpent    the call's token has used up what it may
|-- ReaderTooSlow         the client did not read its stream
|-- DeadlineExceeded      the client's deadline passed before the request was through
|   `-- DeadlineUnreachable  it was refused at once, for it would pass before the first token
|-- NoEngineAvailable     no engine serves
|-- ModelVersionLeft      the model version that the request began on has no engines any more
|-- Draining              this ingress takes no new requests
|-- EngineFailed          the request was admitted, and an engine could not finish it
|   `-- OutputsDiverged   two engines disagree on the same position of a request's output
|-- EngineLost            the session with an engine broke; nothing more will come from it
|-- ControllerUnavailable the controller does not answer: changes wait
|-- UnknownEngine         no engine of that name serves
|-- EngineRefused         an engine could not do what an operator asked of it
|-- UnknownNode           no node, or more than one, is called so
|-- SecretIsInFile        the cluster's secret is replaced in its file, not by an operator's call
|-- NotDoneInTime         a change goes on, but was not done in the time that there was
|-- TokenizerUnusable     the model's tokenizer cannot be served; the ingress does not start
|-- AddressUnavailable    the ingress cannot listen where it was told to
|-- InvalidConfig         the cluster's settings: which, their values, what is allowed
`-- CannotStart           the cluster could not be brought up
    |-- CannotPlace       the Ray cluster has no room for its engines
    `-- CanaryFailed      an engine or a pair did not answer its first request as it has to
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from cluster.api.protos.shared_errors import ClusterError as ClusterError
from cluster.api.protos.shared_errors import InvalidConfig as InvalidConfig


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that is not as it has to be.

    field: its path in the request, such as "sampling_params.top_p"
    """

    field: str
    value: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.field} is {self.value}; allowed: {self.allowed}"


class InvalidRequest(ClusterError):
    """The request cannot be served as it is, here or anywhere: do not retry it unchanged."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(str(violation) for violation in violations))
        self.violations = violations


class ModelNotFound(ClusterError):
    """The request names a model that is not served here."""

    def __init__(self, model: str, served_model: str) -> None:
        super().__init__(f"model {model!r} is not served here; leave model empty or ask for {served_model!r}")
        self.model = model


class Unauthenticated(ClusterError):
    """The call does not say who makes it, or not so that it is believed."""


class PermissionDenied(ClusterError):
    """Who makes the call is known, and may not do that."""


class AdapterNotFound(ClusterError):
    """The request names a LoRA adapter that is not served here."""

    def __init__(self, field: str, name: str, known: list[str], *, is_enabled: bool) -> None:
        """field: of the request; is_enabled: whether any are served"""
        allowed = f"one of those that are known here: {', '.join(known) or 'none so far'}"
        if not is_enabled:
            allowed = "none: this cluster serves no adapters (its setting lora is not set)"
        self.violations = (FieldViolation(field, repr(name), allowed),)
        super().__init__(str(self.violations[0]))


class Overloaded(ClusterError):
    """There is more to do than may wait; retry_delay_s is when to try again."""

    def __init__(self, reason: str, retry_delay_s: float) -> None:
        super().__init__(f"{reason}; retry in {retry_delay_s:.3g} s")
        self.retry_delay_s = retry_delay_s


class AllowanceSpent(Overloaded):
    """A token's own limit is reached; others are served."""

    def __init__(self, who: str, limit: str, retry_delay_s: float) -> None:
        super().__init__(f"token {who!r} is at its limit of {limit}", retry_delay_s)


class ReaderTooSlow(ClusterError):
    """The client has not read its stream; what it has not got it can ask for again, from its position on."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"nothing of the stream was read for {timeout_s:g} s; resume with output_token_ids")


class DeadlineExceeded(ClusterError):
    """The client's deadline passed; the request was aborted on its engines."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"{request_id}: the request's deadline passed before it was through")


class DeadlineUnreachable(DeadlineExceeded):
    """What is before the request takes longer than its client will wait. No engine has seen it."""

    def __init__(self, time_left_s: float, expected_s: float) -> None:
        ClusterError.__init__(
            self,
            f"the deadline is in {time_left_s:.3g} s, and the first token is expected in {expected_s:.3g} s at the "
            "earliest; give it more time, or try again when there is less to do",
        )


class NoEngineAvailable(ClusterError):
    """No engine serves, or none that could do this. One may be there a moment later."""

    def __init__(self, what: str = "serves") -> None:
        """what: none of them does."""
        super().__init__(f"no engine {what}; retry when one is ready")


class ModelVersionLeft(ClusterError):
    """The cluster was updated: engines of another model version must not go on with what this one began."""

    def __init__(self, version: int) -> None:
        super().__init__(f"its model version {version} has left the cluster")


class Draining(ClusterError):
    """This ingress is about to close. Another one, or this address a little later, will take the request."""

    def __init__(self) -> None:
        super().__init__("this ingress is draining and takes no new requests; retry, on another one if there is one")


class EngineFailed(ClusterError):
    """An engine could not finish an admitted request.

    num_new_tokens: how many output tokens its client has got since it asked
    can_resume:     the fault was the engine's, not the request's: it can go on elsewhere
    """

    def __init__(self, request_id: str, reason: str, *, num_new_tokens: int, can_resume: bool) -> None:
        super().__init__(f"{request_id}: {reason}")
        self.reason = reason
        self.num_new_tokens = num_new_tokens
        self.can_resume = can_resume


class OutputsDiverged(EngineFailed):
    """An engine sent another token than the one that its client already has at that position."""


class EngineLost(ClusterError):
    """The session with an engine broke.

    has_left:    it was drained, and told us to go on without it
    is_silent:   it may live, but nothing was heard from it
    had_request: it had said that it had got the request that this error ends
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
        """The same for one of the requests that it ends."""
        error = copy(self)
        error.had_request = had_request
        return error


class ControllerUnavailable(ClusterError):
    """The controller does not answer. What is there goes on; changes wait for it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the controller does not answer: {reason}")


class UnknownEngine(ClusterError):
    """No engine of that name serves."""

    def __init__(self, engine_id: str, serving: list[str]) -> None:
        super().__init__(f"no engine {engine_id!r} serves; these do: {', '.join(serving) or 'none'}")


class EngineRefused(ClusterError):
    """An engine could not do, or not now, what an operator asked of it."""

    def __init__(self, engine_id: str, reason: str) -> None:
        super().__init__(f"engine {engine_id}: {reason}")


class UnknownNode(ClusterError):
    """No node, or more than one, is called so."""

    def __init__(self, name: str, nodes: list[str]) -> None:
        super().__init__(f"{name!r} does not name one node of the Ray cluster; there are: {', '.join(nodes)}")


class SecretIsInFile(ClusterError):
    """The cluster's secret comes from a file, and is replaced there."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the cluster's secret is in cluster_secret_file, {path}: put a new one above it on every node, and take "
            "the old one out once every node has both; raypd follows the file"
        )


class NotDoneInTime(ClusterError):
    """What was asked for goes on, but was not done in the time that there was."""

    def __init__(self, what: str, wait_s: float, missing: str = "") -> None:
        """missing: what it waits for, in words"""
        waits = f", and waits for {missing}" if missing else ""
        super().__init__(f"{what} was not done within {wait_s:g} s; it goes on{waits}: see `raypd status`")


class TokenizerUnusable(ClusterError):
    """The model's tokenizer cannot be served; the message says why."""


class AddressUnavailable(ClusterError):
    """The ingress cannot listen at its address."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen at {address}: {reason}; free the port or choose another (0 for any)")
        self.address = address


class CannotStart(ClusterError):
    """The cluster could not be brought up; the message says which part and why."""


class CannotPlace(CannotStart):
    """The Ray cluster has not enough of something."""


class CanaryFailed(CannotStart):
    """An engine, or a pair, does not answer its first request as it has to."""
