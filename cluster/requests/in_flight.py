"""A request that an ingress works on, from its admission to its end."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.observability.status import RequestView
from cluster.observability.stopwatch import Stopwatch
from cluster.requests.ledger import Ledger
from cluster.requests.model_versions import EnginesOfVersion
from cluster.requests.recovery import Recovery


@dataclass(slots=True)
class InFlight:
    """One request, for those who ask what the ingress does.

    engines:  those of its model version, once that is chosen
    recovery: once it is prepared; None for one that wants vectors, since each of its prompts has a recovery of its own
    """

    request_id: str
    tenant: str
    arrived_at_s: float
    stopwatch: Stopwatch
    ledger: Ledger
    engines: EnginesOfVersion | None = None
    recovery: Recovery | None = None

    @property
    def model_version(self) -> int:
        """The number of its model version; 0 until one is chosen."""
        return 0 if self.engines is None else self.engines.model.version

    @property
    def num_moves(self) -> int:
        """How often another decode engine has taken it over after a preemption."""
        return 0 if self.recovery is None else self.recovery.num_moves

    def view(self) -> RequestView:
        """Describe it for people to see."""
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
            num_moves=self.recovery.num_moves,
            model_version=self.model_version,
        )
