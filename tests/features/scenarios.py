"""The columns of the table: the same requests, and what happens to them. Each proves that it happened."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from actors.config import EngineConfig
from actors.core.requests.request import Request
from actors.core.scheduler import Scheduler
from actors.engine_core import EngineCore, StepResult
from tests.features.feature import Feature, Scenario, Setup
from tests.integration.promises import CUT
from tests.integration.recovering_cluster import RecoveringCluster, recovering_cluster

_TIMEOUT_S: Final = 60.0
_STEPS_BETWEEN_PREEMPTIONS: Final = 4
_NUM_ROUNDS: Final = 3
_MAX_ROUNDS: Final = 4 * _NUM_ROUNDS

Outcomes = dict[str, BaseException | None]
_Asking = asyncio.Future[list[BaseException | None]]


async def run_scenario(scenario: Scenario, setup: Setup) -> Outcomes:
    """Ask for every feature that the scenario is for, at once; by name, what was wrong with its answer.

    Raises AssertionError if what the scenario is about did not happen, or left anything behind.
    """
    features = [feature for feature in setup.features if scenario in feature.scenarios]
    if not features:
        return {}
    config = _with_overlap(setup.config) if scenario is Scenario.OVERLAPPED else setup.config
    async with (
        recovering_cluster(config, [*_engines_of(scenario), *setup.encoders]) as cluster,
        asyncio.timeout(_TIMEOUT_S),
    ):
        await cluster.join(*_members_of(scenario), *setup.encoders)
        num_streams = sum(feature.num_streams for feature in features)
        preempted = cluster.engines if scenario is Scenario.PREEMPTED else ()
        preemptions = [_Preemptions(cluster, name, num_streams) for name in preempted]
        asking = asyncio.gather(*(feature.visit(cluster.serving) for feature in features), return_exceptions=True)
        if scenario is Scenario.RESUMED:
            await _crash(cluster, features, asking)
        outcomes = dict(zip((feature.name for feature in features), await asking, strict=True))
        await cluster.until_idle()
        if scenario is Scenario.PREEMPTED:
            assert sum(each.num_preempted for each in preemptions) >= max(1, num_streams)
        if scenario not in (Scenario.PREFILL_ONLY, Scenario.DECODE_ONLY):
            _assert_handed_over(cluster, features)
        setup.check(cluster)
    return outcomes


def _engines_of(scenario: Scenario) -> list[str]:
    resumed = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    return resumed if scenario is Scenario.RESUMED else _members_of(scenario)


def _members_of(scenario: Scenario) -> list[str]:
    """Return the engines that serve from the beginning."""
    if scenario is Scenario.PREFILL_ONLY:
        return ["prefill-0"]
    return ["decode-0"] if scenario is Scenario.DECODE_ONLY else ["prefill-0", "decode-0"]


async def _crash(cluster: RecoveringCluster, features: Sequence[Feature], asking: _Asking) -> None:
    """Kill the engine that the requests are on: in the middle of their output, or before it has computed anything."""
    num_streams = sum(feature.num_streams for feature in features)
    if num_streams == 0:
        cluster.barriers["prefill-0"].close(0)
        await _first_of(cluster.barriers["prefill-0"].is_reached, asking)
        await cluster.join("prefill-1")
        await cluster.kill("prefill-0")
        return
    cluster.tap.close(["decode-0"], CUT, num_streams)
    await _first_of(cluster.tap.has_stopped, asking)
    await cluster.join("decode-1")
    await cluster.kill("decode-0")


async def _first_of(event: asyncio.Event, asking: _Asking) -> None:
    """Wait for the event; if it can no longer come, the answers say why."""
    waiting = asyncio.create_task(event.wait())
    asking.add_done_callback(lambda _: waiting.cancel())
    await asyncio.wait([waiting])
    assert event.is_set(), f"over before the crash: {asking.result()}"


class _Preemptions:
    """Preempts everything that an engine runs, some times, and makes it forget what it had cached."""

    def __init__(self, cluster: RecoveringCluster, engine_id: str, num_streams: int) -> None:
        """num_streams: how many preemptions are wanted at least"""
        core = cluster.engines[engine_id]._core
        assert core is not None
        self.num_preempted = 0
        self._num_streams = num_streams
        self._core: EngineCore = core
        self._step = core.step
        self._num_steps = 0
        self._num_rounds = 0
        core.step = self._preempt_and_step  # type: ignore[method-assign]  # the engine's thread calls this one

    def _preempt_and_step(self) -> StepResult:
        scheduler = self._core.scheduler
        # Requests that come one after the other are preempted one by one.
        is_enough = self._num_rounds >= _NUM_ROUNDS and self.num_preempted >= self._num_streams
        if not is_enough and self._num_rounds < _MAX_ROUNDS and any(map(_is_in_the_middle, scheduler.running)):
            # Steps that nobody is in the middle of do not count: how many there are is a matter of luck.
            is_due = self._num_steps % _STEPS_BETWEEN_PREEMPTIONS == 0
            self._num_steps += 1
            if is_due:
                self._preempt(scheduler)
        return self._step()

    def _preempt(self, scheduler: Scheduler) -> None:
        num_before = scheduler.make_stats().num_preemptions
        scheduler.reset_prefix_cache(reset_running_requests=True)
        num_preempted = scheduler.make_stats().num_preemptions - num_before
        self._num_rounds += num_preempted > 0
        self.num_preempted += num_preempted


def _is_in_the_middle(request: Request) -> bool:
    """Tell whether it is in the middle of its output, or of the prompt that a vector is wanted for."""
    return request.num_output_tokens > 1 or (request.pooling_params is not None and request.num_computed_tokens > 0)


def _assert_handed_over(cluster: RecoveringCluster, features: Sequence[Feature]) -> None:
    if sum(feature.num_streams for feature in features):
        stats = [engine.stats.transfer_stats for name, engine in cluster.engines.items() if name.startswith("prefill")]
        assert any(stat is not None and stat.num_sent_bytes for stat in stats), "nothing was handed over"


def _with_overlap(config: EngineConfig) -> EngineConfig:
    return config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"overlap": True})})
