"""Scales a simulated fleet as Ray Serve scales a deployment: by the requests that are under way, and nothing else.

The rule is that of ray.serve's default policy: wanted = ceil(requests under way / target_ongoing_requests), with the
requests averaged over look_back_period_s. More replicas are wanted only once that has been so for upscale_delay_s
without a break, and fewer once it has been so for downscale_delay_s. The defaults of Ray Serve are 2 requests, 30 s,
30 s and 600 s. Each role is a deployment of its own, with a target of its own, as in Ray Serve's examples of prefill
and decode.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.routing.engine_connection import EngineRole
from cluster.simulation.fleet.simulated_fleet import SimulatedFleet
from cluster.simulation.ingresses.simulated_ingress import SimulatedIngress


@dataclass(frozen=True, slots=True)
class AutoscalerSettings:
    """Ray Serve's settings of the same names, with its defaults. max_replicas: of each role"""

    look_back_period_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    max_replicas: int = 64


DEFAULTS: Final = AutoscalerSettings()


class ThresholdAutoscaler:
    """A FleetControl. targets: the requests under way that each engine of a role should have"""

    interval_s = 1.0

    def __init__(self, targets: Mapping[EngineRole, float], settings: AutoscalerSettings = DEFAULTS) -> None:
        self._deployments = {role: ThresholdRule(target, settings) for role, target in targets.items()}

    def look(self, fleet: SimulatedFleet, ingresses: Sequence[SimulatedIngress], now_s: float) -> None:
        """Decide about each role, and scale those that should change."""
        counts: dict[EngineRole, int] = {}
        for role, deployment in self._deployments.items():
            engines = [engine for engine in fleet.serving if engine.descriptor.role is role]
            num_ongoing = sum(len(engine.scheduler.requests) for engine in engines)
            present = sum(slot.role is role for slot in fleet.wanted)
            wanted = deployment.decide(present, num_ongoing, now_s)
            if wanted != present:
                counts[role] = wanted
        if counts:
            fleet.scale(counts)


class ThresholdRule:
    """The measurements and decisions of one role. _direction: 1 as long as more replicas are wanted, -1 for fewer"""

    def __init__(self, target: float, settings: AutoscalerSettings = DEFAULTS) -> None:
        """Take no measurement yet. target: the requests under way that each replica should have"""
        self._target = target
        self._settings = settings
        self._measured: deque[tuple[float, int]] = deque()
        self._direction, self._since_s = 0, 0.0

    def decide(self, present: int, num_ongoing: int, now_s: float) -> int:
        """Take a measurement in, and return how many replicas there should be.

        present: the replicas that are wanted now, those that start included; num_ongoing: their requests under way
        """
        settings, measured = self._settings, self._measured
        measured.append((now_s, num_ongoing))
        while measured[0][0] <= now_s - settings.look_back_period_s:
            measured.popleft()
        mean = sum(number for _, number in measured) / len(measured)
        wanted = min(max(math.ceil(mean / self._target), 1), settings.max_replicas)
        direction = (wanted > present) - (wanted < present)
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        delay_s = settings.upscale_delay_s if direction > 0 else settings.downscale_delay_s
        if not direction or now_s - self._since_s < delay_s:
            return present
        self._direction = 0
        return wanted
