from cluster.engine_connection import EngineDescriptor, EngineRole
from cluster.pool.membership import Membership


def engine(engine_id: str, incarnation: int = 1) -> EngineDescriptor:
    return EngineDescriptor(engine_id, incarnation, EngineRole.BOTH, "127.0.0.1:1")


def test_every_change_is_a_new_version() -> None:
    first = Membership(0, ()).with_engine(engine("a"))
    second = first.with_engine(engine("b"))
    assert (first.version, second.version) == (1, 2)
    assert second.engines == (engine("a"), engine("b"))


def test_a_new_incarnation_takes_the_old_ones_place() -> None:
    members = Membership(0, ()).with_engine(engine("a", 1)).with_engine(engine("a", 2))
    assert members.engines == (engine("a", 2),)


def test_removing_an_old_incarnation_leaves_the_new_one_and_the_version_alone() -> None:
    members = Membership(0, ()).with_engine(engine("a", 2))
    assert members.without_engine("a", 1) is members
    assert members.without_engine("a", 2) == Membership(2, ())
