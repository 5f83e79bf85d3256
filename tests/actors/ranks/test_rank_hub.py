"""Rank 0's hub and the connections of further ranks, without any engine behind them.

Tests of actors/ranks/rank_stream.py.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from actors.core.outputs.scheduler_output import SchedulerOutput, StepBatch
from actors.model.errors import RankLost
from actors.ranks import rank_hub
from actors.ranks.rank_hub import RankHub
from actors.ranks.rank_messages import (
    RankConnection,
    RankFailed,
    RankReady,
    RankSecrets,
    RankStep,
    RankStop,
    RankTrusts,
    RankWoke,
)
from kv_transfer.errors import HungUp
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust, TrustMaterial
from kv_transfer.trust.refusals import Refusals
from tests.trusted import with_tls

TIMEOUT_S = 60.0
HUB = Party("decode-0", 1)


@pytest.fixture(autouse=True)
def _patient_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers have more time to prove themselves than a test has: nobody gets in because theirs is over."""
    monkeypatch.setattr(rank_hub, "PROOF_TIMEOUT_S", 2 * TIMEOUT_S)


class Engine:
    """A hub and the far ends of its connections."""

    def __init__(self, num_further_ranks: int, tls: bool = False) -> None:
        self.woke = threading.Event()
        trust = Trust(TrustMaterial.draw())
        self.member = Member(HUB, with_tls(trust) if tls else trust)
        self.refusals = Refusals()
        self.hub = RankHub("127.0.0.1", num_further_ranks, TIMEOUT_S, self.woke.set, self.member, self.refusals)
        self.ranks: dict[int, RankConnection] = {}

    def dial(self, rank: int) -> RankConnection:
        connection = RankConnection(socket.create_connection(self.hub.address, TIMEOUT_S), TIMEOUT_S)
        self.ranks[rank] = connection
        return connection

    def call(self, rank: int) -> None:
        """Connect as a rank does: again, if it is cut off."""
        while True:
            connection = self.dial(rank)
            try:
                connection.introduce(Member(Party(f"decode-0/{rank}", 1), self.member.trust), HUB, TIMEOUT_S)
            except RankLost as error:
                if not isinstance(error.__cause__, HungUp):
                    raise
            else:
                return

    def gather(self, *ranks: int) -> None:
        callers = [threading.Thread(target=self.call, args=(rank,)) for rank in ranks]
        for caller in callers:
            caller.start()
        self.hub.accept_all(TIMEOUT_S, lambda: None)
        for caller in callers:
            caller.join(TIMEOUT_S)

    def close(self) -> None:
        self.hub.close()
        for rank in self.ranks.values():
            rank.close()


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(2, tls=request.param)
    yield engine
    engine.close()


def step(number: int) -> SchedulerOutput:
    return SchedulerOutput(StepBatch.empty(), [], {f"finished-{number}"}, step_index=number)


def answer(token_id: int) -> RankStep:
    return RankStep(np.array([[token_id]]), None)


def test_steps_reach_every_rank_in_order_and_answers_come_back_by_rank(engine: Engine) -> None:
    engine.gather(2, 1)
    for number in (1, 2):
        engine.hub.broadcast(step(number))
    for rank in (2, 1):
        for number in (1, 2):
            received = engine.ranks[rank].receive()
            assert isinstance(received, SchedulerOutput)
            assert (received.step_index, received.finished_req_ids) == (number, {f"finished-{number}"})
            engine.ranks[rank].send(answer(10 * rank + number))
    assert [other.token_ids.tolist() for other in engine.hub.collect_steps()] == [[[11]], [[21]]]
    assert [other.token_ids.tolist() for other in engine.hub.collect_steps()] == [[[12]], [[22]]]


def test_ranks_say_where_they_are_and_when_a_step_is_due(engine: Engine) -> None:
    engine.gather(1, 2)
    for rank in (2, 1):
        engine.ranks[rank].send(RankReady(f"host:{rank}"))
    assert [ready.control_address for ready in engine.hub.collect_ready(TIMEOUT_S)] == ["host:1", "host:2"]
    assert not engine.woke.is_set()
    engine.ranks[2].send(RankWoke())
    assert engine.woke.wait(TIMEOUT_S)


def test_a_rank_that_is_gone_wakes_an_idle_engine_and_fails_every_later_call(engine: Engine) -> None:
    engine.gather(1, 2)
    engine.ranks[2].close()
    assert engine.woke.wait(TIMEOUT_S)
    for call in (lambda: engine.hub.broadcast(step(1)), engine.hub.collect_steps, engine.hub.collect_steps):
        with pytest.raises(RankLost, match="rank 2: its process has ended"):
            call()


def test_a_rank_that_failed_says_why(engine: Engine) -> None:
    engine.gather(1, 2)
    engine.ranks[1].send(RankFailed("CheckpointError: no weights"))
    assert str(engine.hub.explain(RankLost("a broken connection"))) == "rank 1: CheckpointError: no weights"


def test_a_silent_rank_is_waited_for_up_to_the_deadline() -> None:
    engine = Engine(1)
    engine.gather(1)
    engine.hub._timeout_s = 0.3
    with pytest.raises(RankLost, match=r"rank 1 did not answer within 0\.3 s"):
        engine.hub.collect_steps()
    engine.close()


def test_strangers_are_turned_away_before_anything_of_theirs_is_unpickled(engine: Engine) -> None:
    material = engine.member.trust.material
    assert material is not None
    other = Trust(replace(TrustMaterial.draw(), tls=material.tls))
    stranger = engine.dial(9)
    hub = threading.Thread(target=engine.hub.accept_all, args=(TIMEOUT_S, lambda: None))
    hub.start()
    # The hub hangs up on everybody else once it has its ranks, so the stranger has to be answered before they call.
    with pytest.raises(RankLost, match="does not know the cluster's secret"):
        stranger.introduce(Member(Party("decode-0/1", 1), other), HUB, TIMEOUT_S)
    callers = [threading.Thread(target=engine.call, args=(rank,)) for rank in (1, 2)]
    for caller in callers:
        caller.start()
    for thread in (hub, *callers):
        thread.join(TIMEOUT_S)
    assert engine.refusals.total == 1
    engine.hub.broadcast(step(1))
    assert isinstance(engine.ranks[1].receive(), SchedulerOutput)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"], ids=["nothing", "half a handshake"])
def test_a_silent_stranger_does_not_keep_the_ranks_out(said: bytes, tls: bool) -> None:
    engine = Engine(1, tls=tls)
    with socket.create_connection(engine.hub.address, TIMEOUT_S) as stranger:
        stranger.sendall(said)
        engine.gather(1)
        engine.hub.broadcast(step(1))
        assert isinstance(engine.ranks[1].receive(), SchedulerOutput)
    engine.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"\xff" * 64], ids=["nothing", "half a handshake", "nonsense"])
def test_more_strangers_than_are_heard_at_a_time_do_not_keep_the_ranks_out(said: bytes, tls: bool) -> None:
    """They came first, and none of them hangs up."""
    engine = Engine(2, tls=tls)
    with ExitStack() as strangers:
        for _ in range(100):
            stranger = strangers.enter_context(socket.create_connection(engine.hub.address, TIMEOUT_S))
            stranger.sendall(said)
        engine.gather(1, 2)
        engine.hub.broadcast(step(1))
        for rank in (1, 2):
            assert isinstance(engine.ranks[rank].receive(), SchedulerOutput)
    assert engine.refusals.total >= 100 - 64, "all that were cut off are counted"
    engine.close()


@pytest.mark.parametrize(
    ("hub_has_tls", "rank_has_tls", "reason"),
    [
        (True, False, "internal_tls has to be the same at both ends"),
        (False, True, "internal_tls has to be the same at both ends"),
        (True, True, "no TLS connection came about"),
    ],
)
def test_a_rank_with_the_secret_and_without_the_clusters_tls_is_refused(
    hub_has_tls: bool, rank_has_tls: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(1, tls=hub_has_tls)
    material = engine.member.trust.material
    assert material is not None
    plain = Trust(replace(material, tls=None))
    caller = threading.Thread(target=engine.hub.accept_all, args=(TIMEOUT_S, lambda: None))
    caller.start()
    with pytest.raises(RankLost, match="the hub did not prove itself"):
        engine.dial(1).introduce(
            Member(Party("decode-0/1", 1), with_tls(plain) if rank_has_tls else plain), HUB, TIMEOUT_S
        )
    engine.call(1)
    caller.join(TIMEOUT_S)
    engine.close()
    assert reason in str([vars(record) for record in caplog.records])


def test_a_message_that_fills_every_buffer_arrives_while_another_goes_the_other_way(engine: Engine) -> None:
    engine.gather(1, 2)
    large = RankStep(np.arange(4_000_000, dtype=np.int64), None)
    sender = threading.Thread(target=engine.ranks[1].send, args=(large,))
    sender.start()
    engine.hub.broadcast(step(1))
    assert isinstance(engine.ranks[1].receive(), SchedulerOutput)
    engine.ranks[2].send(answer(1))
    received, _ = engine.hub.collect_steps()
    assert np.array_equal(received.token_ids, large.token_ids)
    sender.join(TIMEOUT_S)


def test_ranks_that_never_call_are_named() -> None:
    engine = Engine(2)
    caller = threading.Thread(target=engine.call, args=(2,))
    caller.start()
    with pytest.raises(RankLost, match="rank 1: its process ended"):
        engine.hub.accept_all(
            TIMEOUT_S, lambda: "rank 1: its process ended with 1" if engine.hub._connections else None
        )
    with pytest.raises(RankLost, match=r"ranks \[1\] did not start within 0.2 s"):
        engine.hub.accept_all(0.2, lambda: None)
    caller.join(TIMEOUT_S)
    engine.close()


def test_the_end_of_the_engine_is_the_end_of_its_ranks(engine: Engine) -> None:
    engine.gather(1, 2)
    engine.hub.close()
    for rank in (1, 2):
        assert isinstance(engine.ranks[rank].receive(), RankStop)
        with pytest.raises(RankLost):
            engine.ranks[rank].receive()
    assert not engine.woke.is_set(), "an end that was asked for is no loss"


def test_new_secrets_reach_every_rank_and_are_settled_once_all_have_taken_them(engine: Engine) -> None:
    engine.gather(1, 2)
    before = engine.member.trust.generation
    assert engine.member.trust.settled_generation == before
    new = TrustMaterial.draw()
    engine.member.trust.use(new)
    engine.hub.broadcast(step(1))
    for rank in (1, 2):
        assert engine.ranks[rank].receive() == RankSecrets.of(new)
        assert isinstance(engine.ranks[rank].receive(), SchedulerOutput)
        assert engine.member.trust.settled_generation == before
        engine.ranks[rank].send(RankTrusts(new.generation))
        engine.ranks[rank].send(answer(rank))
    engine.hub.collect_steps()
    assert engine.member.trust.settled_generation == new.generation


def test_a_rank_that_calls_after_a_replacement_had_begun_gets_the_new_secret_first() -> None:
    engine = Engine(1)
    old, drawn = engine.member.trust.material, TrustMaterial.draw()
    assert old is not None
    both = TrustMaterial(drawn.generation, (*drawn.secrets, *old.secrets))
    engine.member.trust.use(both)
    connection = engine.dial(1)
    calling = threading.Thread(
        target=connection.introduce, args=(Member(Party("decode-0/1", 1), Trust(old)), HUB, TIMEOUT_S)
    )
    calling.start()
    engine.hub.accept_all(TIMEOUT_S, lambda: None)
    calling.join(TIMEOUT_S)
    received = connection.receive()
    assert isinstance(received, RankSecrets)
    assert received.material == both
    engine.close()


@pytest.mark.parametrize("name", ["decode-0/9", "decode-0/0", "decode-0", "decode-1/1", "decode-0/+1"])
def test_one_of_the_cluster_that_is_no_rank_of_this_engine_is_refused(engine: Engine, name: str) -> None:
    impostor = engine.dial(9)
    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(engine.hub.accept_all, TIMEOUT_S, lambda: None)
        with pytest.raises(RankLost):
            impostor.introduce(Member(Party(name, 1), engine.member.trust), HUB, TIMEOUT_S)
        for rank in (1, 2):
            engine.call(rank)
        accepting.result(TIMEOUT_S)
    assert dict(engine.refusals.counts) == {"other_party": 1}
    engine.hub.broadcast(step(1))
    for rank in (1, 2):
        assert isinstance(engine.ranks[rank].receive(), SchedulerOutput)
