"""A real run is recorded, and fresh schedulers and routers that are told the same decide the same, one by one.

Tests of actors/recording/begin_recording.py, actors/recording/recorded_scheduler.py,
actors/recording/scheduler_replay.py, cluster/routing/recording/recorded_routing.py,
cluster/routing/recording/router_replay.py.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.sampling_params import SamplingParams
from actors.recording.replay import Replay
from actors.recording.scheduler_replay import replay_scheduler
from actors.recording_config import DecisionRecordingConfig
from cluster.parameters.generation import GenerateRequest, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.simulation.replays import replay_recording
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import PrefixSource
from tests.engine_pair import EnginePair, engine_config
from tests.integration.local_cluster import LocalCluster, local_cluster
from tests.reference import random_prompt

pytestmark = [pytest.mark.more, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_models")]

_CheckpointOf = Callable[[str], Path]
_GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
_SHARED = random_prompt(64, seed=100)


def _replays(directory: Path) -> dict[str, Replay]:
    found = [replay_scheduler(path) for path in directory.iterdir()]
    return {replay.who: replay for replay in found}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_recorded_run_is_decided_again_step_by_step(checkpoint: _CheckpointOf, tmp_path: Path, overlap: bool) -> None:
    recording = DecisionRecordingConfig(directory=tmp_path / "recorded")
    prefill, decode = (
        engine_config(
            checkpoint("llama"), num_blocks=num_blocks, max_num_batched_tokens=48, max_num_seqs=8, overlap=overlap
        ).model_copy(update={"decision_recording": recording})
        for num_blocks in (64, 32)
    )
    with EnginePair(prefill, decode) as pair:
        for number in range(6):
            prompt = [*_SHARED, *random_prompt(26 + number, seed=number)]
            pair.hand_over(f"handoff {number}", prompt, _GREEDY)
        pair.run(lambda: len(pair.answers["handoff 0"].token_ids) > 3)
        pair.abort("handoff 1")
        pair.submit("decode", "alone", random_prompt(70, seed=9), _GREEDY)
        pair.run()
        source = PrefixSource(pair.addresses["prefill"], 80)
        pair.submit("decode", "fetched", [*_SHARED, *random_prompt(26, seed=0)], _GREEDY, source)
        pair.run()
        stats = {name: engine.make_stats() for name, engine in pair.engines.items()}
    # The run has what makes schedules hard to repeat: chunks, prefix hits, a fetch, preemption, an abort.
    assert stats["decode"].num_preemptions > 0
    assert stats["prefill"].prefix_cache_stats.hits > 0
    replays = _replays(tmp_path / "recorded")
    assert {who: one.difference for who, one in replays.items()} == {"prefill-0 (1)": None, "decode-0 (1)": None}
    for who, name in (("prefill-0 (1)", "prefill"), ("decode-0 (1)", "decode")):
        assert replays[who].counts["Scheduled"] > stats[name].num_steps > 4
        assert replays[who].counts["Ended"] >= 1


async def _answer(cluster: LocalCluster, number: int, max_chunks: int) -> None:
    """Ask, and leave after so many parts of the answer."""
    prompt = TokenPrompt([*_SHARED, *random_prompt(20 + number, seed=number)])
    sampling = SamplingOptions(temperature=0.0, max_tokens=40, ignore_eos=True)
    request = GenerateRequest(request_id=f"r{number}", prompt=prompt, sampling=sampling)
    async with aclosing(cluster.serving.generate(request)) as chunks:
        num_chunks = 0
        async for _ in chunks:
            num_chunks += 1
            if num_chunks >= max_chunks:
                return


async def _serve(cluster: LocalCluster) -> None:
    """Serve three waves of requests. In each, one client leaves before its answer is complete."""
    for wave in range(3):
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(_answer(cluster, wave * 8 + number, 4 if number == 3 else 1000))


def test_a_recorded_cluster_takes_the_same_steps_and_routes_in_another_process(
    checkpoint: _CheckpointOf, tmp_path: Path
) -> None:
    recording = DecisionRecordingConfig(directory=tmp_path)
    transfer = KVTransferConfig(transport="tcp")
    prefill, decode = (
        engine_config(
            checkpoint("llama"), num_blocks=num_blocks, max_num_batched_tokens=48, max_num_seqs=8, transfer=transfer
        ).model_copy(update={"decision_recording": recording})
        # Two to three of the requests fit into the second pool, so some are preempted however they arrive.
        for num_blocks in (64, 16)
    )

    async def run() -> dict[str, SchedulerStats]:
        async with local_cluster(prefill, decode, recording=recording) as cluster:
            await _serve(cluster)
            return {name: engine.stats for name, engine in cluster.engines.items()}

    engines = asyncio.run(run())
    assert sum(stats.num_preemptions for stats in engines.values()) > 0
    assert sum(stats.prefix_cache_stats.hits for stats in engines.values()) > 0
    replays = {replay.who: replay for replay in map(replay_recording, tmp_path.iterdir())}
    assert {who: one.difference for who, one in replays.items()} == dict.fromkeys(
        ("prefill-0 (1)", "decode-0 (1)", "ingress ingress-0")
    )
    assert replays["ingress ingress-0"].counts["Chosen"] >= 24
    # Nothing may rest on the order of sets, which another process has otherwise.
    command = [sys.executable, "-m", "cluster", "replay", str(tmp_path)]
    found = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
