"""NCCL links when a peer, a call or NCCL itself fails, and when the abort does.

Tests of kv_transfer/errors.py, kv_transfer/transports/nccl_communicator.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kv_transfer.errors import ChunkTimeout, LinkLost
from kv_transfer.transports import nccl_communicator
from tests.kv_transfer.transports.fake_nccl import GARBAGE, FakeNcclError, FakeNetwork
from tests.kv_transfer.transports.nccl_ends import TIMEOUT_S, End, linked, make_end, random_blocks, start

SHORT_S = 0.05


@pytest.fixture
def ends(network: FakeNetwork) -> tuple[End, End]:
    return make_end(network), make_end(network)


def blocks() -> list[Tensor]:
    return list(random_blocks(4, 16).unbind())


# -- a peer that is gone or slow ---------------------------------------------------------------------------------------


def test_a_chunk_that_stalls_past_its_deadline_aborts_the_communicator(ends: tuple[End, End]) -> None:
    with linked(*ends) as (producer, _):
        with pytest.raises(ChunkTimeout, match=r"a chunk did not move within 0\.05 s"):
            producer.send(blocks(), SHORT_S)
        assert ends[0].fake.comms[0].is_aborted
        assert ends[0].wedged == []


def test_after_a_timeout_the_device_touches_the_blocks_no_more(ends: tuple[End, End]) -> None:
    """The abort itself leaves garbage; what the engine puts there afterwards stays, though the peer sends at last."""
    target = blocks()
    with linked(*ends) as (producer, consumer):
        with pytest.raises(ChunkTimeout):
            consumer.receive(target, SHORT_S)
        assert all(block.eq(GARBAGE).all() for block in target)
        for block in target:
            block.fill_(1)
        with pytest.raises(LinkLost):
            producer.send(blocks(), TIMEOUT_S)
        assert all(block.eq(1).all() for block in target)


def test_a_peer_that_is_gone_is_heard_of_at_once_where_nccl_tells(ends: tuple[End, End]) -> None:
    with linked(*ends) as (producer, consumer):
        sending = start(lambda: producer.send(blocks(), 60 * TIMEOUT_S))
        consumer.abort()
        with pytest.raises(LinkLost, match="NCCL status 6"):
            sending.result(TIMEOUT_S)


def test_where_nccl_does_not_tell_the_deadline_does(network: FakeNetwork, ends: tuple[End, End]) -> None:
    network.tells_peer = False
    with linked(*ends) as (producer, consumer):
        consumer.abort()
        with pytest.raises(ChunkTimeout):
            producer.send(blocks(), SHORT_S)


def test_an_abort_from_another_thread_wakes_a_waiting_end(ends: tuple[End, End]) -> None:
    waits = threading.Event()
    ends[0].fake.on_launch = waits.set
    with linked(*ends) as (producer, _):
        sending = start(lambda: producer.send(blocks(), 60 * TIMEOUT_S))
        assert waits.wait(TIMEOUT_S)
        producer.abort()
        with pytest.raises(LinkLost, match="the link was closed"):
            sending.result(TIMEOUT_S)


def test_a_dead_link_refuses_chunks_at_once(ends: tuple[End, End]) -> None:
    with linked(*ends) as (producer, _):
        producer.abort()
        producer.abort()
        with pytest.raises(LinkLost, match="the link was closed"):
            producer.send(blocks(), TIMEOUT_S)


def test_a_link_is_rebuilt_under_a_new_id(ends: tuple[End, End]) -> None:
    with linked(*ends) as (producer, _):
        producer.abort()
    target = [torch.zeros_like(block) for block in blocks()]
    with linked(*ends) as (producer, consumer):
        sending = start(lambda: producer.send(blocks(), TIMEOUT_S))
        consumer.receive(target, TIMEOUT_S)
        sending.result(TIMEOUT_S)
    assert all(torch.equal(a, b) for a, b in zip(target, blocks(), strict=True))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FakeNcclError(3), "NCCL failed: NCCL status 3"),
        (KeyError(7), "NCCL failed with code 7"),  # cupy's table of codes ends before it
    ],
)
def test_an_asynchronous_error_ends_a_chunk_in_flight(ends: tuple[End, End], error: Exception, says: str) -> None:
    with linked(*ends) as (producer, _):
        ends[0].fake.comms[0].fail(error)
        with pytest.raises(LinkLost, match=says):
            producer.send(blocks(), TIMEOUT_S)
        assert ends[0].fake.comms[0].is_aborted


def test_a_chunk_that_seems_complete_is_lost_if_nccl_reports_an_error_with_it(ends: tuple[End, End]) -> None:
    with linked(*ends) as (producer, consumer):
        consumer_comm = ends[1].fake.comms[0]
        ends[1].fake.on_launch = lambda: consumer_comm.fail(FakeNcclError(6))
        sending = start(lambda: producer.send(blocks(), TIMEOUT_S))
        with pytest.raises(LinkLost, match="NCCL status 6"):
            consumer.receive(blocks(), TIMEOUT_S)
        sending.exception(TIMEOUT_S)  # its bytes had left, or NCCL told it of the abort first
        with pytest.raises(LinkLost):
            producer.send(blocks(), TIMEOUT_S)


def test_a_call_that_fails_inside_a_group_ends_the_group(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(*ends) as (producer, _):
        monkeypatch.setattr(ends[0].fake.comms[0], "send", failing(FakeNcclError(4)))
        num_open_groups = ends[0].fake.num_open_groups
        with pytest.raises(LinkLost, match="NCCL status 4"):
            producer.send(blocks(), TIMEOUT_S)
        assert ends[0].fake.num_open_groups == num_open_groups == 0


def test_what_is_no_error_of_nccl_is_not_taken_for_one(
    network: FakeNetwork, ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(*ends) as (producer, _):
        monkeypatch.setattr(ends[0].fake.comms[0], "send", failing(TypeError("a bug of ours")))
        with pytest.raises(TypeError, match="a bug of ours"):
            producer.send(blocks(), TIMEOUT_S)
        network.wait_until(lambda: ends[0].fake.comms[0].is_aborted)


def failing(error: Exception) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


# -- calls that hang ---------------------------------------------------------------------------------------------------


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_communicator, "_ABORT_GRACE_S", SHORT_S)


def test_a_peer_that_never_joins_costs_no_more_than_the_deadline(network: FakeNetwork, ends: tuple[End, End]) -> None:
    producer, consumer = ends
    pending = producer.transport.listen()
    with pytest.raises(LinkLost, match=r"did not join the NCCL communicator within 0\.05 s"):
        pending.accept(SHORT_S)
    assert producer.transport.num_abandoned == 1
    # It joins after all, and finds nobody: what the abandoned thread gets, it aborts.
    with pytest.raises(LinkLost):
        consumer.transport.connect(pending.rendezvous, SHORT_S)
    network.wait_until(lambda: producer.fake.comms != [] and producer.fake.comms[0].is_aborted)


def test_a_peer_that_dies_before_the_warm_up_costs_no_more_than_the_deadline(
    network: FakeNetwork, ends: tuple[End, End]
) -> None:
    network.tells_peer = False
    producer, consumer = ends
    consumer.fake.may_launch.clear()
    pending = producer.transport.listen()
    connecting = start(lambda: consumer.transport.connect(pending.rendezvous, SHORT_S))
    with pytest.raises(LinkLost, match="did not join"):
        pending.accept(2 * SHORT_S)
    with pytest.raises(LinkLost, match="did not join"):
        connecting.result(TIMEOUT_S)
    consumer.fake.allow(consumer.fake.may_launch)


@pytest.mark.usefixtures("short_grace")
def test_a_host_that_is_stuck_inside_nccl_is_woken_by_the_abort(ends: tuple[End, End]) -> None:
    with linked(*ends) as (producer, _):
        ends[0].fake.may_launch.clear()
        with pytest.raises(ChunkTimeout):
            producer.send(blocks(), SHORT_S)
        assert ends[0].wedged == []


@pytest.mark.usefixtures("short_grace")
def test_a_link_that_waits_for_its_turn_to_launch_has_its_own_deadline(network: FakeNetwork) -> None:
    producer, first, second = (make_end(network) for _ in range(3))
    with linked(producer, first) as (stuck, _), linked(producer, second) as (behind, _):
        is_inside = threading.Event()
        producer.fake.on_launch = is_inside.set
        producer.fake.may_launch.clear()
        sending = start(lambda: stuck.send(blocks(), 60 * TIMEOUT_S))
        assert is_inside.wait(TIMEOUT_S)
        with pytest.raises(ChunkTimeout):
            behind.send(blocks(), SHORT_S)
        stuck.abort()
        with pytest.raises(LinkLost):
            sending.result(TIMEOUT_S)


def test_an_abort_lets_the_owner_leave_nccl_first(
    network: FakeNetwork, ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_communicator, "_ABORT_GRACE_S", TIMEOUT_S)
    with linked(*ends) as (producer, _):
        fake, is_inside = ends[0].fake, threading.Event()
        fake.on_launch = is_inside.set
        fake.may_launch.clear()
        sending = start(lambda: producer.send(blocks(), TIMEOUT_S))
        assert is_inside.wait(TIMEOUT_S)
        producer.abort()
        with network.changed:
            assert not network.changed.wait_for(lambda: fake.comms[0].is_aborted, SHORT_S)
        fake.allow(fake.may_launch)
        with pytest.raises(LinkLost):
            sending.result(TIMEOUT_S)
        network.wait_until(lambda: fake.comms[0].is_aborted)


def test_an_abort_that_returns_before_its_kernels_have_left_is_not_believed(network: FakeNetwork) -> None:
    producer, consumer = make_end(network, abort_timeout_s=SHORT_S), make_end(network)
    with linked(producer, consumer) as (near, _):
        producer.fake.may_run_kernels.clear()
        with pytest.raises(ChunkTimeout):
            near.send(blocks(), SHORT_S)
        assert len(producer.wedged) == 1
        network.wait_until(lambda: producer.fake.comms[0].is_aborted)
        producer.fake.allow(producer.fake.may_run_kernels)


def fail_from_now_on(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end.fake, "on_launch", failing(FakeNcclError(3)))


def test_what_was_queued_before_a_failing_launch_is_waited_for(
    network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_communicator, "STAGING_SIZE_BYTES", 64)
    producer, consumer = make_end(network, abort_timeout_s=SHORT_S), make_end(network)
    with linked(producer, consumer) as (near, _):
        producer.fake.may_run_kernels.clear()
        monkeypatch.setattr(producer.fake, "on_launch", lambda: fail_from_now_on(producer, monkeypatch))
        with pytest.raises(LinkLost, match="NCCL status 3"):
            near.send([*blocks(), *blocks()], TIMEOUT_S)
        assert len(producer.wedged) == 1, "the first group is in flight"
        producer.fake.allow(producer.fake.may_run_kernels)


def test_an_abort_that_hangs_with_nothing_in_flight_costs_a_thread_and_not_the_engine(network: FakeNetwork) -> None:
    producer, consumer = make_end(network), make_end(network)
    with linked(producer, consumer) as (near, _):
        producer.fake.may_abort.clear()
        near.close()
        assert producer.wedged == []
        assert not producer.fake.device.streams[1].is_closed, "its communicator still has it"
        producer.fake.allow(producer.fake.may_abort)


def test_an_abort_that_hangs_ends_the_engine_before_the_link_is_said_to_be_dead(network: FakeNetwork) -> None:
    producer, consumer = make_end(network, abort_timeout_s=SHORT_S), make_end(network)
    with linked(producer, consumer) as (near, _):
        producer.fake.may_abort.clear()
        with pytest.raises(ChunkTimeout):
            near.send(blocks(), SHORT_S)
        assert producer.wedged == ["an NCCL link could not be aborted within 0.05 s"]
        near.close()
        assert len(producer.wedged) == 1, "said once"
        producer.fake.allow(producer.fake.may_abort)
