from __future__ import annotations

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.commands.demo import demo_prompts, exposed_transfer_s

FINISHED = generate_pb2.REQUEST_STATUS_FINISHED_LENGTH_CAPPED
RUNNING = generate_pb2.REQUEST_STATUS_RUNNING


def engine(**changes: float) -> generate_pb2.EngineTimings:
    statuses = {"prefilled": FINISHED, "running": RUNNING}
    made = [generate_pb2.StatusChange(status=statuses[name], at_s=at_s) for name, at_s in changes.items()]
    return generate_pb2.EngineTimings(status_changes=made)


def test_prompts_begin_with_heads_of_functions_and_no_two_alike() -> None:
    prompts = demo_prompts(16)
    assert len(prompts) == 16
    assert prompts[:3] == demo_prompts(3)
    assert prompts[0].startswith("def fibonacci")
    assert len({prompt[:16] for prompt in prompts}) == 16
    lengths = [len(prompt) for prompt in prompts[3:]]
    assert lengths == sorted(lengths)


def test_the_exposed_part_of_a_transfer_is_from_the_end_of_prefill_to_running() -> None:
    timings = generate_pb2.Timings(
        prefill_engine=engine(running=1.0, prefilled=2.0),
        decode_engine=engine(running=2.25),
        transfer=generate_pb2.Transfer(transfer_s=0.5),
    )
    assert exposed_transfer_s(timings) == 0.25


def test_without_a_handoff_no_transfer_is_exposed() -> None:
    assert exposed_transfer_s(generate_pb2.Timings(decode_engine=engine(running=2.25))) is None
