"""Preempted requests migrate between two engines: their KV, and their state behind it, are fetched from there.

Everything else happens as well: handoffs, lost links, aborts. Both engines go on with a request until one is told to
let go. The workers check each slot and each state before they compute anything.

Tests of actors/core/loads/prefix_loads.py and actors/core/steps/preemption.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, rule

from actors.core.outputs.scheduler_stats import PrefixCacheStats
from kv_transfer.params import PrefixSource
from kv_transfer.prefix.prefix_fetch import PrefixFetches
from kv_transfer.prefix.prefix_sources import PrefixSources
from tests.actors.core.builders import BLOCK_SIZE, EOS, make_request
from tests.actors.core.chunk_bounds import ChunkBound
from tests.actors.core.fakes import reference_tokens
from tests.actors.core.simulated_link import DECODE, PREFILL
from tests.actors.core.test_prefill_decode_properties import SETUPS, PrefillDecodeMachine, Setup

_ADDRESSES = {"prefill": PREFILL, "decode": DECODE}


def make_roomy(setup: Setup) -> Setup:
    """The same engine, with a prefix cache, and blocks for some requests with their states."""
    return replace(setup, num_blocks=setup.num_blocks + 8, max_num_seqs=1 + setup.max_num_seqs, caching=True)


class MigrationMachine(PrefillDecodeMachine):
    """Two engines that fetch prefixes from each other, and clients that let preempted requests migrate."""

    @initialize(
        prefill=SETUPS.map(make_roomy),
        decode=SETUPS.map(make_roomy),
        max_reserved=st.integers(1, 4),
        max_chunk_bytes=st.sampled_from([1, 8 << 20]),
        num_state_blocks=st.sampled_from([0, 1, 2]),
    )
    def start(
        self, prefill: Setup, decode: Setup, max_reserved: int, max_chunk_bytes: int, num_state_blocks: int
    ) -> None:
        self.num_seen = {"prefill": 0, "decode": 0}
        self.migrating: list[tuple[str, str]] = []
        super().start(prefill, decode, max_reserved, max_chunk_bytes, num_state_blocks)

    def make_sources(self, *, is_producer: bool) -> PrefixSources:
        name = "prefill" if is_producer else "decode"
        return PrefixSources(None, PrefixFetches(f"{name}/1", BLOCK_SIZE, max_fetches=2, clock=self.clock))

    def check_leaving(self, transfer_id: str, block_ids: list[int]) -> None:
        """Blocks of a fetch are checked where they are used."""
        if not transfer_id.startswith("fetch-"):
            super().check_leaving(transfer_id, block_ids)

    @rule(num_tokens=st.integers(1, 11), name=st.sampled_from(["prefill", "decode"]), num_requests=st.integers(2, 3))
    def decode_long(self, num_tokens: int, name: str, num_requests: int) -> None:
        """Requests that grow together until blocks are short."""
        for _ in range(num_requests):
            self.num_requests += 1
            prompts = ([*range(first, first + num_tokens)] for first in count(1000 * self.num_requests))
            prompt = next(prompt for prompt in prompts if EOS not in reference_tokens(prompt, 24))
            self.engines[name].submit(make_request(f"r{self.num_requests}", prompt, max_tokens=24))

    @rule(name=st.sampled_from(["prefill", "decode"]), num_steps=st.integers(2, 16), is_settled=st.booleans())
    def steps_with_migrations(self, name: str, num_steps: int, is_settled: bool) -> None:
        for _ in range(num_steps):
            self.engines[name].step()
            self.check()
            self.preempted_requests_migrate()
        if is_settled:
            self.migrations_are_settled()

    @rule()
    def preempted_requests_migrate(self) -> None:
        """Each goes on at the other engine, too, unless the engine that has preempted it was quicker."""
        for here, there in (("prefill", "decode"), ("decode", "prefill")):
            engine = self.engines[here]
            news, self.num_seen[here] = engine.outputs[self.num_seen[here] :], len(engine.outputs)
            for output in news:
                request = engine.scheduler.requests.get(output.request_id)
                if output.preemption is None or request is None:
                    continue
                self.num_requests += 1
                moved = make_request(
                    f"m{self.num_requests}",
                    request.prompt_token_ids,
                    max_tokens=request.max_tokens,
                    output_token_ids=request.output_token_ids,
                    arrival_time_s=self.clock.now_s,
                )
                moved.prefix_source = PrefixSource(_ADDRESSES[here], output.preemption.num_computed_tokens)
                self.engines[there].submit(moved)
                self.migrating.append((here, request.request_id))

    @rule()
    def migrations_are_settled(self) -> None:
        """The first engines are told to let go."""
        for name, request_id in self.migrating:
            self.engines[name].abort(request_id)
        self.migrating.clear()


def preempted_at_decode(max_chunk_bytes: int = 8 << 20) -> MigrationMachine:
    """Make engines of which one has two requests and has preempted the later one, and the other one has room."""
    setup = Setup(
        num_blocks=14,
        max_num_seqs=4,
        budget=24,
        chunked=True,
        policy="fcfs",
        caching=True,
        watermark=0.0,
        overlap=False,
        failure="recompute",
        bound=ChunkBound(None, "both"),
        token_s=None,
    )
    machine = MigrationMachine()
    machine.start(replace(setup, num_blocks=30), setup, 4, max_chunk_bytes, num_state_blocks=2)
    machine.decode_long(9, "decode", 2)
    while not any(output.preemption for output in machine.decode.outputs):
        machine.decode.step()
    return machine


def run_both(machine: MigrationMachine) -> PrefixCacheStats:
    """Run until both engines are empty, and return what the prefill engine has found."""
    machine.teardown()
    return machine.prefill.scheduler.make_stats().prefix_cache_stats


@pytest.mark.parametrize("num_shared", [0, 8])
def test_a_request_that_migrates_goes_on_from_its_state(num_shared: int) -> None:
    machine = preempted_at_decode()
    if num_shared:
        # The prefill engine has blocks of the prompt, and the state after them only within a longer prompt.
        prompt = machine.decode.submitted["r2"].prompt_token_ids[:num_shared]
        machine.prefill.submit(make_request("other", [*prompt, *range(50, 60)], max_tokens=1))
        for _ in range(4):
            machine.prefill.step()
    machine.preempted_requests_migrate()
    stats = run_both(machine)
    assert (stats.fetched, stats.hits) == (16 - num_shared, 0)
    [moved] = [request for name, request in machine.prefill.submitted.items() if name.startswith("m")]
    assert moved.num_cached_tokens == 16
    assert moved.num_prompt_tokens_computed == 0


@pytest.mark.parametrize("num_blocks", range(6))
def test_a_request_whose_fetch_fails_starts_over(num_blocks: int) -> None:
    """The link is lost after so many of 4 blocks of tokens and 2 of the state."""
    machine = preempted_at_decode(max_chunk_bytes=1)
    machine.preempted_requests_migrate()
    machine.prefill.step()
    [link] = machine.network.links
    for _ in range(20):
        machine.network.deliver_upward(link)
        machine.decode.step()
        machine.network.deliver_downward(link)
        machine.network.chunk_leaves(link)
        if len(machine.prefill.received) < num_blocks:
            machine.network.chunk_arrives(link)
    assert len(machine.prefill.received) == num_blocks
    link.cut()
    machine.has_faults = True
    assert run_both(machine).fetched == 0


def test_nothing_is_sent_of_a_prefix_whose_state_is_not_there() -> None:
    machine = preempted_at_decode()
    machine.preempted_requests_migrate()
    [moved] = machine.prefill.submitted.values()
    source = moved.prefix_source
    assert source is not None
    moved.prefix_source = replace(source, num_tokens=12)
    stats = run_both(machine)
    assert (stats.fetched, machine.prefill.received) == (0, set())


_SETTINGS = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

TestMigrations = MigrationMachine.TestCase
TestMigrations.settings = settings(_SETTINGS, max_examples=6)


class MigrationMachineInTestMore(MigrationMachine):
    """The same, with more examples."""


TestMigrationsInTestMore = pytest.mark.timeout(600)(pytest.mark.more(MigrationMachineInTestMore.TestCase))
TestMigrationsInTestMore.settings = settings(_SETTINGS, max_examples=150)


class MigrationMachineAtLength(MigrationMachine):
    """The same, for long."""


TestMigrationsAtLength = pytest.mark.timeout(7200)(pytest.mark.long(MigrationMachineAtLength.TestCase))
TestMigrationsAtLength.settings = settings(_SETTINGS, max_examples=15_000)
