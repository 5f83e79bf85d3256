"""Opens the sessions between engines and ingresses, and lets engines report their load and their caches there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from cluster.simulation.cluster_spec import ClusterSpec
from cluster.simulation.engines.simulated_engine import SimulatedEngine
from cluster.simulation.event_queue import EventQueue
from cluster.simulation.ingresses.simulated_ingress import SimulatedIngress
from cluster.simulation.ingresses.simulated_session import SimulatedSession

_Sessions = Sequence[tuple[SimulatedIngress, SimulatedSession]]


class EngineReports:
    """The reports of all engines to all ingresses. draw: says when an engine's later reports come"""

    def __init__(
        self, spec: ClusterSpec, events: EventQueue, ingresses: Sequence[SimulatedIngress], draw: random.Random
    ) -> None:
        self._spec = spec
        self._events = events
        self._ingresses = ingresses
        self._draw = draw

    def begin(self, engine: SimulatedEngine) -> None:
        """Open sessions with the ingresses that have none with this engine, and let it report there."""
        sessions = [(ingress, ingress.on_engine(engine)) for ingress in self._ingresses if not ingress.knows(engine)]
        if not sessions:
            return
        self._report(engine, sessions)
        # The first report is at once; the later ones of the engines do not come all at the same time.
        first_s = self._events.now_s + self._draw.random() * self._spec.stats_interval_s
        self._events.at(first_s, self._report_again, engine, sessions)

    def _report_again(self, engine: SimulatedEngine, sessions: _Sessions) -> None:
        open_sessions = [(ingress, session) for ingress, session in sessions if session.is_open]
        if engine.is_dead or not open_sessions:
            return
        if not engine.is_stopped:
            self._report(engine, open_sessions)
        self._events.at(self._events.now_s + self._spec.stats_interval_s, self._report_again, engine, open_sessions)

    def _report(self, engine: SimulatedEngine, sessions: _Sessions) -> None:
        report, kv_events = engine.load_report(), engine.take_kv_events()
        num_waiting = engine.num_waiting_requests
        for ingress, session in sessions:
            num_taken = engine.num_taken[ingress.number]
            is_own = num_taken == report.num_taken_requests
            own = report if is_own else replace(report, num_taken_requests=num_taken)
            if self._spec.stats_delay_s > 0:
                due_s = self._events.now_s + self._spec.stats_delay_s
                self._events.at(due_s, ingress.on_report, session, own, num_waiting, kv_events)
            else:
                ingress.on_report(session, own, num_waiting, kv_events)
