"""Facts on an engine in its descriptor."""

from __future__ import annotations

from cluster.routing.engine_connection import EngineDescriptor, EngineRole


def test_handoffs_go_up_the_roles_and_within_a_role_up_the_numbers() -> None:
    engines = [
        EngineDescriptor(f"{role.value}-{number}", 1, role, "127.0.0.1:1")
        for role in (EngineRole.ENCODE, EngineRole.PREFILL, EngineRole.BOTH, EngineRole.DECODE)
        for number in (0, 1, 2, 10)
    ]
    ranks = [engine.handoff_rank for engine in engines]
    assert ranks == sorted(set(ranks))


def test_an_engine_whose_role_is_switched_stands_where_its_new_role_stands() -> None:
    switched = EngineDescriptor("decode-0", 1, EngineRole.PREFILL, "127.0.0.1:1")
    assert switched.handoff_rank < EngineDescriptor("decode-1", 1, EngineRole.DECODE, "127.0.0.1:1").handoff_rank
    assert switched.handoff_rank == EngineDescriptor("prefill-0", 1, EngineRole.PREFILL, "127.0.0.1:1").handoff_rank
