"""Holds what an ingress knows of a request that it works on, from admission to end."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.observability.record_writer import RecordWriter
from cluster.observability.status import RequestView
from cluster.observability.stopwatch import Stopwatch
from cluster.requests.ledger import Ledger
from cluster.requests.model_versions import EnginesOfVersion
from cluster.requests.recovery import Recovery


@dataclass(slots=True)
class InFlight:
    """One request that is admitted and has not ended; `raypd status` and the metrics read it.

    arrived_at_s: Unix time in seconds
    record:       collects what becomes of the request
    engines:      the engines of the request's model version; None until the version is chosen
    recovery:     None until the request is prepared, and for a request for vectors, each prompt of which has its own
    """

    request_id: str
    tenant: str
    arrived_at_s: float
    stopwatch: Stopwatch
    ledger: Ledger
    record: RecordWriter
    engines: EnginesOfVersion | None = None
    recovery: Recovery | None = None

    @property
    def model_version(self) -> int:
        """The number of the request's model version; 0 until one is chosen."""
        return 0 if self.engines is None else self.engines.model.version

    @property
    def num_migrations(self) -> int:
        """How often another decode engine has taken the request over after a preemption."""
        return 0 if self.recovery is None else self.recovery.num_migrations

    def view(self) -> RequestView:
        """Describe the request for `raypd status`."""
        attempt = None if self.recovery is None else self.recovery.attempt
        if self.recovery is None or attempt is None:
            phase = "prefill" if self.ledger.is_waiting else "admitted"
            return RequestView(
                self.request_id, self.arrived_at_s, phase, tenant=self.tenant, model_version=self.model_version
            )
        prefill, decode = attempt.prefill_report, attempt.decode_report
        return RequestView(
            request_id=self.request_id,
            tenant=self.tenant,
            arrived_at_s=self.arrived_at_s,
            phase="decode" if attempt.num_new_tokens else "prefill",
            prefill_engine="" if prefill is None else prefill.engine_id,
            decode_engine=decode.engine_id,
            num_prompt_tokens=self.recovery.num_prompt_tokens,
            num_output_tokens=len(attempt.token_ids),
            attempt=self.recovery.num_attempts,
            num_migrations=self.recovery.num_migrations,
            model_version=self.model_version,
        )
