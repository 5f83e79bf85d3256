"""Greedy tokens equal generate() whatever the tensor-parallel and block sizes of the two engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from actors.core.requests.request import RequestStatus
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_builder import build_engine_core
from actors.engine_core import EngineCore
from actors.ranks.rank_control import RankControl
from kv_transfer.config import KVTransferConfig
from kv_transfer.links.send_receive_thread import DataThread
from kv_transfer.params import EngineAddress, PrefixSource
from tests.checkpoints import make_checkpoint
from tests.engine_pair import EnginePair, engine_config
from tests.rank_threads import RankThreads
from tests.reference import greedy_tokens, random_prompt
from tests.trusted import TRUST, member

NUM_TOKENS = 6
LENGTHS = (1, 17, 40)
SIZES = (1, 2, 4)
BLOCK_SIZES = {"prefill": {1: 8, 2: 16, 4: 8}, "decode": {1: 16, 2: 8, 4: 8}}
"""By tensor-parallel size: over all pairs, equal ones and multiples in both directions."""

NUM_LAYERS, HEAD_DIM = 2, 8
CHECKPOINTS = {"4 KV heads": 4, "2 KV heads, replicated on 4 ranks": 2}


@dataclass(frozen=True)
class Engine:
    core: EngineCore
    address: EngineAddress


class Fleet:
    """One prefill and one decode engine of every size, of one checkpoint; all of them joined by gRPC and sockets."""

    def __init__(
        self,
        directory: Path,
        num_kv_heads: int,
        opened: ExitStack,
        sizes: Sequence[int] = SIZES,
        block_size: int | None = None,
    ) -> None:
        """block_size: of all engines; None: BLOCK_SIZES"""
        self.directory = directory
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.wake = threading.Event()
        self.engines = {
            (role, tp_size): self._start(role, tp_size, opened) for role in BLOCK_SIZES for tp_size in sizes
        }

    def pair(self, prefill_size: int, decode_size: int) -> EnginePair:
        engines = {"prefill": self.engines["prefill", prefill_size], "decode": self.engines["decode", decode_size]}
        cores = {name: engine.core for name, engine in engines.items()}
        return EnginePair.of(cores, {name: engine.address for name, engine in engines.items()}, self.wake)

    def _start(self, role: str, tp_size: int, opened: ExitStack) -> Engine:
        engine_id = f"{role}-tp{tp_size}"
        control = RankControl("127.0.0.1", member(engine_id if tp_size == 1 else f"{engine_id}/0"), link_timeout_s=5.0)
        opened.callback(control.close)
        config = engine_config(
            self.directory,
            block_size=self.block_size or BLOCK_SIZES[role][tp_size],
            num_blocks=64,
            max_num_batched_tokens=32,
            # Of every pair of sizes some have steps that overlap.
            overlap=tp_size == 2,
            transfer=KVTransferConfig(transport="tcp"),
        )
        parallel = config.parallel.model_copy(update={"tensor_parallel_size": tp_size})
        address = EngineAddress(engine_id, 1, control.address)
        core = build_engine_core(
            config.model_copy(update={"parallel": parallel}),
            address,
            control.control,
            self.wake.set,
            launch_ranks=RankThreads,
            trust=TRUST,
        )
        opened.callback(core.shutdown)
        return Engine(core, replace(address, further_rank_addresses=core.executor.facts.further_rank_addresses))


@pytest.fixture(scope="module", params=CHECKPOINTS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    num_kv_heads = CHECKPOINTS[request.param]
    directory = make_checkpoint(
        "qwen3",
        tmp_path_factory.mktemp("unequal"),
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=NUM_LAYERS,
        hidden_size=32,
        head_dim=HEAD_DIM,
        intermediate_size=48,
    )
    with ExitStack() as opened:
        yield Fleet(directory, num_kv_heads, opened)


@pytest.mark.parametrize("decode_size", SIZES)
@pytest.mark.parametrize("prefill_size", SIZES)
def test_tokens_equal_generate_between_engines_of_any_size(prefill_size: int, decode_size: int, fleet: Fleet) -> None:
    pair = fleet.pair(prefill_size, decode_size)
    # Prompts of its own for each pair: nothing is cached.
    prompts = {f"r{n}": random_prompt(n, seed=10 * prefill_size + decode_size) for n in LENGTHS}
    for request_id, prompt in prompts.items():
        pair.hand_over(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
    pair.run()

    for request_id, prompt in prompts.items():
        expected = greedy_tokens(fleet.directory, tuple(prompt), NUM_TOKENS)
        assert pair.answers[request_id].token_ids == expected, request_id
        timings = pair.answers[request_id].timings("decode")
        assert timings.num_prompt_tokens_computed == 0
        assert timings.transfer is not None
        assert timings.transfer.num_bytes == expected_bytes(fleet, prefill_size, decode_size, len(prompt))
    assert RequestStatus.WAITING_FOR_REMOTE_KVS in pair.seen_statuses
    pair.assert_whole()


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 1), (1, 2), (2, 1), (4, 1), (2, 4)])
def test_a_shared_prefix_moves_once_whatever_the_sizes(prefill_size: int, decode_size: int, fleet: Fleet) -> None:
    pair = fleet.pair(prefill_size, decode_size)
    prefix = random_prompt(32, seed=1000 * prefill_size + decode_size)
    for name, length in (("first", 5), ("second", 9)):
        prompt = prefix + random_prompt(length, seed=length)
        pair.hand_over(name, prompt, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
        pair.run()
        assert pair.answers[name].token_ids == greedy_tokens(fleet.directory, tuple(prompt), NUM_TOKENS)
    moved = pair.answers["second"].timings("decode").transfer
    assert moved is not None
    assert moved.num_bytes == expected_bytes(fleet, prefill_size, decode_size, 9), "the prefix is whole blocks of both"
    pair.assert_whole()


@pytest.mark.parametrize(
    ("prefill_size", "decode_size", "is_found"), [(1, 2, True), (1, 4, True), (2, 1, True), (4, 2, True), (2, 2, False)]
)
def test_a_prefix_is_fetched_from_an_engine_of_another_size(
    prefill_size: int, decode_size: int, is_found: bool, fleet: Fleet
) -> None:
    """Blocks of another size have other hashes, so nothing is found, and everything is computed."""
    check_fetch(fleet, prefill_size, decode_size, is_found=is_found)


def check_fetch(fleet: Fleet, prefill_size: int, decode_size: int, *, is_found: bool) -> None:
    """Let the prefill engine ask the decode engine for a prefix that it has computed."""
    pair = fleet.pair(prefill_size, decode_size)
    prompt = random_prompt(50, seed=5000 + 10 * prefill_size + decode_size)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    pair.submit("decode", "first", prompt, params, None)
    pair.run()
    num_loaded = pair.engines["prefill"].make_stats().prefix_cache_stats.loaded
    pair.submit("prefill", "again", prompt, params, PrefixSource(pair.addresses["decode"], 48))
    pair.run()
    for request_id in ("first", "again"):
        assert pair.answers[request_id].token_ids == greedy_tokens(fleet.directory, tuple(prompt), NUM_TOKENS)
    num_loaded = pair.engines["prefill"].make_stats().prefix_cache_stats.loaded - num_loaded
    assert num_loaded == (48 if is_found else 0)
    pair.assert_whole()


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "block_size"),
    [("gemma4", 8), ("mimo", 8), ("gemma3n", 8), ("qwen3", 16)]
    + [
        pytest.param(family, 8, marks=pytest.mark.slow)
        for family in ("granite_swa", "granitemoe_swa", "nemotron", "longcat_flash")
    ],
)
def test_the_kv_of_every_layer_goes_to_the_ranks_that_hold_its_heads(
    family: str, block_size: int, tmp_path: Path
) -> None:
    """Gemma 4 has layers with two KV heads and layers with one, which both ranks hold."""
    with ExitStack() as opened:
        fleet = Fleet(make_checkpoint(family, tmp_path), 2, opened, sizes=(1, 2), block_size=block_size)
        check_fetch(fleet, 1, 2, is_found=True)
        check_fetch(fleet, 2, 1, is_found=True)
        for prefill_size, decode_size in ((1, 2), (2, 1)):
            check_broken_link(fleet, prefill_size, decode_size, is_early=False)
        for prefill_size, decode_size in ((1, 2), (2, 1), (2, 2)):
            pair = fleet.pair(prefill_size, decode_size)
            prompt = random_prompt(40, seed=10 * prefill_size + decode_size)
            params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            request_id = f"{prefill_size}-{decode_size}"
            pair.hand_over(request_id, prompt, params)
            pair.run()
            assert pair.answers[request_id].token_ids == greedy_tokens(fleet.directory, tuple(prompt), NUM_TOKENS)
            transfer = pair.answers[request_id].timings("decode").transfer
            layout = pair.engines["decode"].executor.facts.layout
            assert transfer is not None
            assert transfer.num_bytes == -(-len(prompt) // block_size) * layout.block_size_bytes * decode_size, (
                "every head comes once"
            )
            pair.assert_whole()


def expected_bytes(fleet: Fleet, prefill_size: int, decode_size: int, num_tokens: int) -> int:
    """Every consumer rank gets each of its heads once, in whole pieces."""
    piece = min(BLOCK_SIZES["prefill"][prefill_size], BLOCK_SIZES["decode"][decode_size])
    num_heads_received = max(fleet.num_kv_heads, decode_size)
    return -(-num_tokens // piece) * piece * num_heads_received * NUM_LAYERS * 2 * HEAD_DIM * 4


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_a_broken_link_of_one_rank_is_recomputed_for_all(
    prefill_size: int, decode_size: int, is_early: bool, fleet: Fleet
) -> None:
    """is_early: READY has perhaps been said on the other ranks' links, but not on this one: nobody waits for it."""
    check_broken_link(fleet, prefill_size, decode_size, is_early=is_early)


def check_broken_link(fleet: Fleet, prefill_size: int, decode_size: int, *, is_early: bool) -> None:
    """Break the first data link of the prefill engine's rank 0 that opens while a prompt is handed over."""
    pair = fleet.pair(prefill_size, decode_size)
    prompt = random_prompt(70, seed=1000 * is_early + 100 * prefill_size + decode_size)
    prefill, decode = pair.engines["prefill"].scheduler, pair.engines["decode"].scheduler

    def break_once(links: list[DataThread]) -> None:
        source, request = prefill.requests.get("r"), decode.requests.get("r")
        if source is None or request is None:
            return
        if not is_early and not 0 < source.num_computed_tokens < len(prompt):
            return
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            for link in open_links(pair.engines["prefill"]):
                if link not in links:
                    link.abort()
                    links.append(link)

    def on_step() -> None:
        if not broken:
            break_once(broken)
        if pair.answers["r"].is_finished:
            # A producer whose consumer has computed everything itself may still wait for its READY: Serving ends it.
            pair.engines["prefill"].abort("r")

    broken: list[DataThread] = []
    num_computed_before = pair.engines["decode"].make_stats().num_prompt_tokens_computed
    pair.hand_over("r", prompt, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
    pair.run(on_step=on_step)

    assert broken, "there was nothing to break"
    assert pair.answers["r"].token_ids == greedy_tokens(fleet.directory, tuple(prompt), NUM_TOKENS)
    assert pair.engines["decode"].make_stats().num_prompt_tokens_computed > num_computed_before
    pair.assert_whole()


def open_links(core: EngineCore) -> list[DataThread]:
    """Data links of rank 0, on which it sends."""
    executor: Any = core.executor  # the test reaches through every layer, to where the network is
    worker = getattr(executor, "_local", executor)._worker
    connector = worker._connector
    # Only layers with KV of one shape have a side that stages other bytes, around the ranks' parts.
    parts = getattr(connector, "_links", connector)
    links = parts._pairs._agent._links._links.values()
    return [link.data for link in list(links) if link.data is not None and link.is_usable]
