"""An engine's part in one attempt of a request: its outputs one by one, and how they ended."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Final

from actors.core.outputs.engine_core_outputs import EndCause, EngineCoreOutput, RequestTimings
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.errors import EngineLost, FieldViolation, InvalidRequest
from cluster.parameters.generation import EngineReport
from cluster.parameters.structured_output_rules import refused_by_compiler
from cluster.routing.engine_connection import EngineConnection

logger = logging.getLogger(__name__)


class EndKind(Enum):
    """How an engine's part in a request ended."""

    OVER = "the engine sent its last output, or dropped the request, or was told to abort it"
    GIVEN_UP = "the engine refused the request, as any other engine would"
    OUT_OF_BLOCKS = "the engine gave the request up because it had too few blocks"
    CUT_OFF = "the session broke; the engine may still run, or never received the request"
    DIED = "the engine has probably died while it had the request"


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The end of one engine's outputs.

    reason: why the engine failed the request; None if the engine did not fail
    """

    kind: EndKind
    reason: str | None = None

    @property
    def can_resume(self) -> bool:
        """Whether the engine and not the request was the cause, so that another engine can go on."""
        return self.kind in (EndKind.OUT_OF_BLOCKS, EndKind.CUT_OFF, EndKind.DIED)


_OVER: Final = StreamEnd(EndKind.OVER)


class EngineStream:
    """The outputs that one engine makes of the request, from its submission on.

    end: how the outputs ended; None as long as more may come
    """

    def __init__(self, connection: EngineConnection, request: EngineCoreRequest) -> None:
        self.connection = connection
        self._request_id = request.request_id
        self._attempt = request.attempt
        self._structured_output = request.sampling_params.structured_output
        self._lora = request.lora
        self._outputs = connection.submit(request)
        self.engine_id = connection.descriptor.engine_id
        self.end: StreamEnd | None = None
        self.has_given_tokens = False
        self.timings: RequestTimings | None = None

    async def next_output(self) -> EngineCoreOutput | None:
        """Wait for the next output. Returns None if the engine has failed or sends no more; then `end` says which.

        Raises InvalidRequest if the request's grammar does not compile or its adapter cannot be served: no other engine
        could do it either.
        """
        try:
            while (output := await anext(self._outputs, None)) is not None:
                if output.attempt == self._attempt:
                    break
        except EngineLost as exc:
            # A host that is cut off makes all its engines unreachable at once, which no request has caused. After a
            # host has died, a request may still be sent to a second engine on it before that engine's end is noticed.
            has_died = exc.had_request and not (exc.has_left or exc.is_silent)
            self.end = StreamEnd(EndKind.DIED if has_died else EndKind.CUT_OFF, str(exc))
            return None
        if output is None or output.finished:
            self.end = self.end or _OVER
        if output is None:
            return None
        self.timings = output.timings or self.timings
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            reason = output.error or f"it ended with reason {output.finish_reason}"
            if output.end_cause is EndCause.REQUEST_AT_FAULT and self._structured_output is not None:
                raise refused_by_compiler(self._structured_output, reason)
            if output.end_cause is EndCause.ADAPTER_AT_FAULT and self._lora is not None:
                allowed = f"an adapter that can be served: {reason}"
                raise InvalidRequest(FieldViolation("lora_name", repr(self._lora.name), allowed))
            kind = EndKind.OUT_OF_BLOCKS if output.end_cause is EndCause.INPUTS_MISSING else EndKind.GIVEN_UP
            self.end = StreamEnd(kind, f"engine {self.engine_id} gave the request up: {reason}")
            return None
        self.has_given_tokens |= bool(output.new_token_ids)
        return output

    @property
    def failure(self) -> str | None:
        """Why the engine has failed the request; None if the engine has not."""
        return None if self.end is None else self.end.reason

    @property
    def has_died(self) -> bool:
        """Whether the engine has probably died while it had the request."""
        return self.end is not None and self.end.kind is EndKind.DIED

    def abort(self) -> None:
        """Let the engine free what the request holds there. Does nothing if the outputs have ended already."""
        if self.end is None:
            self.end = _OVER
            self.connection.abort(self._request_id)

    @property
    def report(self) -> EngineReport:
        """The engine, with its times for this request."""
        return EngineReport(self.engine_id, self.timings)
