"""Bounds the chunks of prompts that run beside decodes, by a cost model that is sure, for tests at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from actors.config import EngineRoleName
from actors.core.scheduler import Scheduler
from actors.costs.step_cost_model import Residuals, StepCostModel
from actors.costs.step_shape import FEATURES

_SECONDS: Final = {"step": 10e-3, "token": 1e-3, "decode": 1e-4, "prefill": 1e-3}
_MODEL: Final = StepCostModel(
    tuple(_SECONDS.get(name, 0.0) for name in FEATURES),
    tuple(Residuals(kind, 1000, high=0.1, median_size=0.05) for kind in ("decode", "prefill", "mixed")),
)
ROLES: Final[tuple[EngineRoleName, ...]] = ("prefill", "decode", "both")


@dataclass(frozen=True)
class ChunkBound:
    """itl_s: an aim that leaves room for no prompt token beside a decode, for some, or for most; None: no bound"""

    itl_s: float | None
    role: EngineRoleName

    def apply(self, scheduler: Scheduler) -> None:
        """Bound the scheduler's chunks by a model that is sure."""
        scheduler.chunk_budget.use_model(_MODEL)
        scheduler.chunk_budget.set_aims(self.itl_s)
        scheduler.chunk_budget.set_role(self.role)
        is_bound = self.itl_s is not None and scheduler.config.enable_chunked_prefill
        assert (scheduler.chunk_budget.bound_s is not None) is is_bound
