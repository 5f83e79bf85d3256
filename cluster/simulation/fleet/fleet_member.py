"""One slot of a simulated cluster: its engine, over all of the engine's incarnations."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.reconciling.engine_slots import EngineState, ObservedEngine, Slot
from cluster.routing.engine_connection import EngineRole
from cluster.simulation.cluster_spec import EngineSpec
from cluster.simulation.engines.simulated_engine import SimulatedEngine
from cluster.simulation.simulation_result import EngineTotals


@dataclass(slots=True, eq=False)
class FleetMember:
    """The engine of one slot.

    number:   of the slot, in the order in which slots were first wanted
    state:    None: there is no engine now
    engine:   the newest incarnation; None until the first one serves
    held_s, begun_s: when the present engine took its GPUs, and when it began to serve
    drain_begun_s: when the present engine began to drain
    num_idle_looks: how often running the controller has found the draining engine idle
    has_died:       whether the incarnation before this one has died
    """

    slot: Slot
    number: int
    spec: EngineSpec
    state: EngineState | None = None
    engine: SimulatedEngine | None = None
    incarnation: int = 0
    held_s: float = 0.0
    begun_s: float = 0.0
    drain_begun_s: float = 0.0
    num_idle_looks: int = 0
    has_died: bool = False
    _takes_gpus: bool = False
    _ended: list[EngineTotals] = field(default_factory=list)

    @property
    def is_serving(self) -> bool:
        """Whether its engine has requests, or may get some."""
        return self.state in (EngineState.READY, EngineState.DRAINING)

    @property
    def role(self) -> EngineRole:
        """The role in which its engine serves now, or would serve."""
        return self.spec.role if self.engine is None or not self.is_serving else self.engine.descriptor.role

    def observed(self) -> ObservedEngine | None:
        """Return the engine as the reconciler sees it; None if there is none."""
        return None if self.state is None else ObservedEngine(self.slot, self.incarnation, self.state)

    def start(self, incarnation: int, now_s: float) -> None:
        """Begin to start the next incarnation."""
        self.state, self.incarnation, self.held_s, self.num_idle_looks = EngineState.STARTING, incarnation, now_s, 0
        self._takes_gpus = True

    def serve(self, engine: SimulatedEngine, now_s: float) -> None:
        """Let the incarnation that has started serve."""
        self.state, self.engine, self.begun_s = EngineState.READY, engine, now_s

    def end(self, now_s: float) -> None:
        """Note that the engine takes no GPUs any more: it has died, or was removed."""
        if self._takes_gpus:
            self._ended.append(self._newest(now_s))
            self._takes_gpus = False

    def totals(self, now_s: float) -> EngineTotals:
        """Return what the slot's engines have done, in all incarnations."""
        found = [*self._ended, *([self._newest(now_s)] if self._takes_gpus else [])]
        return EngineTotals(
            self.slot.engine_id,
            busy_s=sum(one.busy_s for one in found),
            served_s=sum(one.served_s for one in found),
            num_steps=sum(one.num_steps for one in found),
            num_prompt_tokens=sum(one.num_prompt_tokens for one in found),
            num_output_tokens=sum(one.num_output_tokens for one in found),
            num_preemptions=sum(one.num_preemptions for one in found),
            num_sent_bytes=sum(one.num_sent_bytes for one in found),
            held_s=sum(one.held_s for one in found),
        )

    def _newest(self, now_s: float) -> EngineTotals:
        """Return what the present incarnation has done."""
        if self.engine is None or self.engine.descriptor.incarnation != self.incarnation:
            return EngineTotals(self.slot.engine_id, 0.0, 0.0, 0, 0, 0, 0, 0, held_s=now_s - self.held_s)
        return self.engine.totals(served_s=now_s - self.begun_s, held_s=now_s - self.held_s)
