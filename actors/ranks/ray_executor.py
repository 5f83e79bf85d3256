"""Starts further ranks as Ray actors, in the bundle of their engine's placement group and so on the engine's node.

Ray places, starts and ends the processes. Steps, tokens and KV go over the ranks' own connections (rank_hub.py), as
with process_ranks.py. When an engine actor dies, its rank actors end too: the engine actor owns them, and their
connections to the engine end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.process.garbage_collection import no_collection
from actors.process.log_lines import write_log_lines
from actors.process.openmp import choose_waiting
from actors.process.ray_calls import RayCallFailed, result_of
from actors.process.unused_triton import leave_out_triton
from actors.ranks.rank_messages import RankTask
from actors.ranks.rank_resources import RankResources

logger = logging.getLogger(__name__)

_RESULT_TIMEOUT_S: Final = 10.0


class RankActor:
    """One further rank."""

    def run(self, task: RankTask) -> None:
        """Run the rank; returns when it ends."""
        write_log_lines()
        choose_waiting(on_own_cores=False)  # Ranks are not bound to cores.
        # Imported here, so that a process that only starts this actor does not load torch.
        with no_collection():
            leave_out_triton()
            from actors.ranks.rank_loop import run_rank

        run_rank(task, task.hub[0])


class RayRankLauncher:
    """Starts ranks as actors. Each rank gets as much of the bundle's resources as the engine actor, which is rank 0."""

    def __init__(self, resources: RankResources) -> None:
        self._resources = resources

    def __call__(self, tasks: Sequence[RankTask]) -> RayRanks:
        """Start an actor for each task."""
        resources, group = self._resources, get_current_placement_group()
        assert group is not None, "the controller starts every engine in a placement group"
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
        actor: Any = ray.remote(RankActor)  # Any: Ray defines the class's methods at run time
        options = actor.options(
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            resources=resources.custom or None,
            scheduling_strategy=strategy,
        )
        return RayRanks(tasks, [options.remote() for _ in tasks])


class RayRanks:
    """The actors of further ranks, each with a running call of RankActor.run(). Implements Ranks."""

    def __init__(self, tasks: Sequence[RankTask], actors: Sequence[Any]) -> None:
        self._actors = list(actors)
        self._rank_of_run = {actor.run.remote(task): task.tp_rank for task, actor in zip(tasks, actors, strict=True)}

    def find_lost(self) -> str | None:
        """Return which rank has ended, and why, or None if none has. Blocks only to fetch an ended rank's error."""
        ended, _ = ray.wait(list(self._rank_of_run), timeout=0)
        if not ended:
            return None
        try:
            result_of(ended[0], timeout_s=_RESULT_TIMEOUT_S)
        except RayCallFailed as failed:
            reason = str(failed).splitlines()[-1]
        else:
            reason = "it ended without an error"
        return f"rank {self._rank_of_run[ended[0]]}: {reason}"

    def stop(self, timeout_s: float) -> None:
        """Wait up to timeout_s until the ranks end, then kill their actors, which Ray keeps after run() returned."""
        runs = list(self._rank_of_run)
        _, running = ray.wait(runs, num_returns=len(runs), timeout=timeout_s)
        if running:
            logger.warning("ranks did not end in time and are killed", extra={"num_ranks": len(running)})
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._rank_of_run = [], {}
