"""Peers that are killed or stopped in the middle of a chunk, with real NCCL."""

from __future__ import annotations

import signal
import time

import pytest

from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import LoadOutcome
from kv_transfer.connector.steps import ProducerEnd
from tests.gpu.conftest import Say, Site, Spawn
from tests.gpu.process import Process
from tests.gpu.test_transfer import NUM_TOKENS, SOURCE, TARGET, make_layout
from tests.gpu.transfer_peer import TransferPeer
from tests.trusted import material

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LAYOUT = make_layout(4096)
CONFIG = KVTransferConfig(chunk_timeout_s=5.0)
MAX_ABORT_S = 5.0
DEVICE_SLEEP_S = 4.0


def begin(prefill: Process, decode: Process) -> None:
    """Up to the middle of the second chunk: it is announced, its receive is posted, and its step has not ended.

    The link is open before: its first use takes seconds, and test_opening.py has peers that are lost meanwhile.
    """
    hand_over(prefill, decode, "first")
    for name, target in (("a", TARGET), ("other", (50,))):
        num_tokens = NUM_TOKENS if name == "a" else 16
        prefill.call("produce", name, decode.call("address"), num_tokens)
        decode.call("reserve", name, prefill.call("address"), target, num_tokens)
        prefill.call("wait_ready", name)
    prefill.call("compute", "a", SOURCE, (0, 64), 0)
    prefill.call("compute", "a", SOURCE, (64, 128), 1, DEVICE_SLEEP_S)
    # Control messages are ordered: when this request's end is in, so are the headers of both chunks.
    prefill.call("finish", "other", ProducerEnd.ABORTED)
    decode.call("wait_received", "other")


def hand_over(prefill: Process, decode: Process, name: str = "again") -> None:
    prefill.call("produce", name, decode.call("address"), NUM_TOKENS)
    decode.call("reserve", name, prefill.call("address"), TARGET, NUM_TOKENS)
    prefill.call("wait_ready", name)
    prefill.call("compute", name, SOURCE, (0, NUM_TOKENS), 2)
    prefill.call("finish", name, ProducerEnd.HANDED_OVER)
    assert decode.call("wait_received", name).outcome is LoadOutcome.LOADED
    sent, received = prefill.call("digests"), decode.call("digests")
    assert [received[block] for block in TARGET] == [sent[block] for block in SOURCE]


def spawn_pair(sites: list[Site], spawn: Spawn) -> tuple[Process, Process]:
    return (
        spawn(sites[0], TransferPeer, "prefill-0", LAYOUT, CONFIG, material()),
        spawn(sites[1], TransferPeer, "decode-0", LAYOUT, CONFIG, material()),
    )


def test_a_producer_that_is_killed_inside_a_chunk_frees_its_consumer(sites: list[Site], spawn: Spawn, say: Say) -> None:
    prefill, decode = spawn_pair(sites, spawn)
    begin(prefill, decode)
    started_s = time.monotonic()
    prefill.kill()
    received = decode.call("wait_received", "a")
    abort_s = time.monotonic() - started_s
    say(f"consumer's report {abort_s:.3f} s after the producer's SIGKILL: {received.reason}")
    assert received.outcome is LoadOutcome.FAILED
    # A CPU does not sleep, so more may have left.
    assert received.num_valid_tokens == 64 or sites[0].device == "cpu"
    assert abort_s < MAX_ABORT_S
    assert decode.call("product_is_right")
    hand_over(spawn(sites[0], TransferPeer, "prefill-1", LAYOUT, CONFIG, material()), decode)


def test_a_consumer_that_is_killed_inside_a_chunk_frees_its_producer(sites: list[Site], spawn: Spawn, say: Say) -> None:
    prefill, decode = spawn_pair(sites, spawn)
    begin(prefill, decode)
    started_s = time.monotonic()
    decode.kill()
    reason = prefill.call("wait_failed_sending", "a")
    abort_s = time.monotonic() - started_s
    say(f"producer's report {abort_s:.3f} s after the consumer's SIGKILL: {reason}")
    # The producer's device is still asleep, and its stream waits for it: only then is the link quiet.
    assert abort_s < DEVICE_SLEEP_S + MAX_ABORT_S
    prefill.call("finish", "a", ProducerEnd.ABORTED)
    prefill.call("wait_finished_sending", "a")
    assert prefill.call("product_is_right")
    hand_over(prefill, spawn(sites[1], TransferPeer, "decode-1", LAYOUT, CONFIG, material()))


def test_a_late_writer_does_not_touch_reused_blocks(sites: list[Site], spawn: Spawn) -> None:
    """The producer is stopped past every deadline; what it still has in flight comes to nothing."""
    prefill, decode = spawn_pair(sites, spawn)
    begin(prefill, decode)
    prefill.signal(signal.SIGSTOP)
    received = decode.call("wait_received", "a")
    assert received.outcome is LoadOutcome.FAILED
    decode.call("fill", TARGET, 1.0)
    reused = decode.call("digests")
    prefill.signal(signal.SIGCONT)
    prefill.call("wait_failed_sending", "a")
    prefill.call("finish", "a", ProducerEnd.ABORTED)
    prefill.call("wait_finished_sending", "a")
    assert decode.call("digests") == reused
    hand_over(prefill, decode)
