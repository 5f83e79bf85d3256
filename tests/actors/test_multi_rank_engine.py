"""An engine of several ranks: what it does when one of them is gone, stalls, fails or disagrees.

Tests of actors/engine_builder.py, actors/ranks/multi_rank_executor.py, actors/ranks/process_ranks.py,
actors/ranks/rank_control.py, actors/ranks/rank_group.py, actors/ranks/rank_launcher.py, actors/ranks/rank_loop.py,
actors/ranks/rank_refusals.py, actors/worker_builder.py.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from torch import Tensor

from actors.config import EngineConfig, SpeculativeConfig
from actors.core.requests.adapter import Adapter
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_builder import build_engine_core
from actors.engine_core import EngineCore
from actors.lora_config import LoraConfig
from actors.model.errors import CheckpointError, RankLost, RanksDisagree
from actors.model.forward import FlatForward
from actors.ranks import rank_hub, rank_loop
from actors.ranks.process_ranks import ProcessRanks
from actors.ranks.rank_control import RankControl
from actors.ranks.rank_launcher import RankLauncher, Ranks
from actors.ranks.rank_messages import RankStep, RankTask
from kv_transfer.config import KVTransferConfig
from kv_transfer.links.grpc_control import CONTROL_METHOD
from kv_transfer.params import EngineAddress
from kv_transfer.trust.membership import Trust
from kv_transfer.trust.refusals import Refusals
from tests.actors.speculation import EAGER, proposing, right_by_chance
from tests.engine_pair import engine_config
from tests.fork_server import fork_server
from tests.rank_threads import RankThreads
from tests.reference import greedy_tokens, random_prompt
from tests.trusted import TRUST, member, with_tls

CheckpointOf = Callable[[str], Path]
TIMEOUT_S = 60.0
RANK_TIMEOUT_S = 60.0
SHORT_RANK_TIMEOUT_S = 1.0


class RunningEngine:
    """An engine, stepped by the test."""

    def __init__(self, core: EngineCore, wake: threading.Event, refusals: Refusals) -> None:
        self.core = core
        self.wake = wake
        self.refusals = refusals

    def generate(
        self, prompt: Sequence[int], num_tokens: int, lora: Adapter | None = None, **sampling: Any
    ) -> list[int]:
        settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
        params = SamplingParams(**(settings | sampling))
        self.core.submit(
            EngineCoreRequest(request_id="r", prompt_token_ids=list(prompt), sampling_params=params, lora=lora)
        )
        token_ids: list[int] = []
        while len(token_ids) < num_tokens:
            for batch in self.core.step().outputs.values():
                own = [output for output in batch.outputs if output.request_id == "r"]
                token_ids += [token for output in own for token in output.new_token_ids]
        return token_ids


@contextmanager
def running(
    directory: Path,
    launch: RankLauncher,
    *,
    size: int = 2,
    overlap: bool = False,
    speculative: SpeculativeConfig | None = None,
    lora: LoraConfig | None = None,
    trust: Trust = TRUST,
) -> Iterator[RunningEngine]:
    wake = threading.Event()
    with ExitStack() as opened:
        control = RankControl(
            "127.0.0.1", member("engine" if size == 1 else "engine/0", trust=trust), link_timeout_s=60.0
        )
        opened.callback(control.close)
        address = EngineAddress("engine", 1, control.address)
        config = _config(directory, size, overlap)
        scheduler = config.scheduler.model_copy(update={"speculative": speculative})
        config = config.model_copy(update={"scheduler": scheduler, "lora": lora})
        core = build_engine_core(config, address, control.control, wake.set, launch_ranks=launch, trust=trust)
        opened.callback(core.shutdown)
        yield RunningEngine(core, wake, control.control.refusals)


def _config(directory: Path, size: int, overlap: bool) -> EngineConfig:
    config = engine_config(directory, overlap=overlap, transfer=KVTransferConfig(transport="tcp", link_timeout_s=60.0))
    settings = {"tensor_parallel_size": size, "rank_timeout_s": RANK_TIMEOUT_S}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=settings)})


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_may_overlap_on_all_ranks(overlap: bool, checkpoint: CheckpointOf) -> None:
    directory, prompt = checkpoint("llama"), random_prompt(30)
    with running(directory, RankThreads, size=4, overlap=overlap) as engine:
        assert engine.generate(prompt, 12) == greedy_tokens(directory, tuple(prompt), 12)


def test_ranks_with_tls_give_the_tokens_of_those_without(checkpoint: CheckpointOf) -> None:
    """A long prompt, so that large tensors travel too."""
    directory, prompt = checkpoint("llama"), random_prompt(300)
    with running(directory, RankThreads, trust=with_tls()) as engine:
        assert engine.generate(prompt, 12) == greedy_tokens(directory, tuple(prompt), 12)


def test_all_ranks_sample_the_tokens_that_one_rank_would(checkpoint: CheckpointOf) -> None:
    directory, prompt, answers = checkpoint("qwen3"), random_prompt(30), []
    for size in (1, 4):
        with running(directory, RankThreads, size=size) as engine:
            answers.append(
                engine.generate(prompt, 16, temperature=0.9, top_p=0.95, top_k=50, seed=7, presence_penalty=0.5)
            )
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 5


@pytest.mark.parametrize("overlap", [False, True])
def test_every_rank_copies_the_last_block_of_a_prompt_for_a_further_sample(
    overlap: bool, checkpoint: CheckpointOf
) -> None:
    directory, prompt = checkpoint("llama"), random_prompt(30)
    with running(directory, RankThreads, overlap=overlap) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        engine.core.submit(EngineCoreRequest(request_id="leader", prompt_token_ids=prompt, sampling_params=params))
        while not any(batch.outputs for batch in engine.core.step().outputs.values()):
            pass
        assert engine.generate(prompt, 12) == greedy_tokens(directory, tuple(prompt), 12)
        assert engine.core.make_stats().num_prompt_tokens_computed == len(prompt) + 1


def test_all_ranks_check_the_drafts_of_the_first(checkpoint: CheckpointOf) -> None:
    directory, prompt = checkpoint("llama"), random_prompt(30)
    expected = greedy_tokens(directory, tuple(prompt), 24)
    with (
        proposing(right_by_chance({tuple(prompt): expected})),
        running(directory, RankThreads, speculative=EAGER) as engine,
    ):
        assert engine.generate(prompt, 24) == expected
        stats = engine.core.make_stats()
    assert stats.spec_decoding_stats is not None
    assert stats.spec_decoding_stats.num_accepted_tokens > 0
    assert stats.num_steps < 20


def test_strangers_at_a_further_ranks_port_get_nothing_and_count_with_the_engine(checkpoint: CheckpointOf) -> None:
    directory, prompt = checkpoint("llama"), random_prompt(30)
    with running(directory, RankThreads) as engine:
        (address,) = engine.core.executor.facts.further_rank_addresses
        with grpc.insecure_channel(address) as channel:
            call: Any = channel.stream_stream(CONTROL_METHOD)
            for _ in range(3):
                with pytest.raises(grpc.RpcError, match="it sent no proof of the cluster's secret"):
                    next(call(iter([b"hello"]), timeout=TIMEOUT_S))
        deadline_s = time.monotonic() + TIMEOUT_S
        while engine.refusals.total < 3:
            assert time.monotonic() < deadline_s, "rank 1 tells rank 0"
            time.sleep(0.02)
        assert engine.refusals.total == 3
        assert engine.generate(prompt, 12) == greedy_tokens(directory, tuple(prompt), 12)


def test_the_death_of_a_ranks_process_ends_an_idle_engine_at_once(checkpoint: CheckpointOf) -> None:
    directory, prompt, started = checkpoint("llama"), random_prompt(30), []

    def launch(tasks: Sequence[RankTask]) -> Ranks:
        started.append(ProcessRanks(tasks))
        return started[0]

    with running(directory, launch) as engine:
        assert engine.generate(prompt, 4) == greedy_tokens(directory, tuple(prompt), 4)
        engine.wake.clear()
        process = started[0].processes[1]
        process.kill()
        assert engine.wake.wait(TIMEOUT_S)
        with pytest.raises(RankLost, match="rank 1: its process has ended"):
            engine.generate(prompt, 4)
    assert not started[0].processes


def test_a_rank_that_stalls_ends_the_engine_after_its_deadline(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How a rank starts is another test's.
    context = fork_server()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    started = []

    def launch(tasks: Sequence[RankTask]) -> Ranks:
        started.append(ProcessRanks(tasks))
        return started[0]

    with running(checkpoint("llama"), launch) as engine:
        executor: Any = engine.core.executor
        assert executor._hub._timeout_s == RANK_TIMEOUT_S
        # The start is not to be in a hurry.
        executor._hub._timeout_s = SHORT_RANK_TIMEOUT_S
        executor._group.group.set_timeout(SHORT_RANK_TIMEOUT_S)
        process = started[0].processes[1]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        begin_s = time.monotonic()
        with pytest.raises(RankLost):
            engine.generate(random_prompt(30), 4)
        assert SHORT_RANK_TIMEOUT_S <= time.monotonic() - begin_s < RANK_TIMEOUT_S / 2
        process.kill()


def test_a_rank_that_cannot_load_fails_the_start_with_its_reason(checkpoint: CheckpointOf, tmp_path: Path) -> None:
    def launch(tasks: Sequence[RankTask]) -> Ranks:
        (task,) = tasks
        model = task.config.model.model_copy(update={"model": str(tmp_path)})
        return RankThreads([replace(task, config=task.config.model_copy(update={"model": model}))])

    with (
        pytest.raises(RankLost, match=r"rank 1: CheckpointError: .* has no config\.json"),
        running(checkpoint("llama"), launch),
    ):
        pass


def test_what_rank_0_cannot_load_is_refused_as_with_one_rank(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"), running(tmp_path, RankThreads):
        pass


def test_a_rank_that_fails_in_a_step_ends_the_engine_with_its_reason(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, rank_0 = FlatForward.__call__, threading.current_thread()

    def fail_on_further_ranks(self: FlatForward, *arguments: Any) -> Tensor:
        if threading.current_thread() is not rank_0 and failing.is_set():
            raise ValueError("a broken invariant")
        return forward(self, *arguments)

    failing = threading.Event()
    monkeypatch.setattr(FlatForward, "__call__", fail_on_further_ranks)
    monkeypatch.setattr(rank_hub, "_EXPLANATION_TIMEOUT_S", RANK_TIMEOUT_S)
    with running(checkpoint("llama"), RankThreads) as engine:
        failing.set()
        begin_s = time.monotonic()
        with pytest.raises(RankLost, match="rank 1: ValueError: a broken invariant"):
            engine.generate(random_prompt(30), 4)
        assert time.monotonic() - begin_s < RANK_TIMEOUT_S / 2, "nobody waited for the deadline"


def test_ranks_that_sample_different_tokens_end_the_engine(
    checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(token_ids: np.ndarray, *others: object) -> RankStep:
        del others
        return RankStep(token_ids + 1, None)

    with running(checkpoint("llama"), RankThreads) as engine:
        monkeypatch.setattr(rank_loop, "RankStep", answer)
        with pytest.raises(RanksDisagree, match="rank 1 and rank 0 sampled"):
            engine.generate(random_prompt(30), 4)
