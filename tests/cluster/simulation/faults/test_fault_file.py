from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.config import SchedulerConfig
from actors.costs.step_cost_model import StepCostModel
from actors.costs.step_shape import NUM_FEATURES
from cluster.errors import InvalidConfig
from cluster.routing.decision import RoutingMode
from cluster.routing.engine_connection import EngineRole
from cluster.simulation.cluster_spec import ClusterSpec, EngineSpec, LinkSpec
from cluster.simulation.faults import fault_file
from cluster.simulation.faults.fault import KillEngine, Partition, SlowEngine, StopEngine
from cluster.simulation.faults.fault_file import read_fault_file
from cluster.simulation.timing.step_times import ModelStepTimes

TIMES = ModelStepTimes(StepCostModel((0.01,) * NUM_FEATURES))
SPEC = ClusterSpec(
    tuple(EngineSpec(name, EngineRole.BOTH, TIMES, 10, SchedulerConfig()) for name in ("both-0", "both-1")),
    LinkSpec(1e9, 1e-4),
    kv_bytes_per_token=1,
    routing_mode=RoutingMode.COST,
)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "faults.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_every_kind_of_fault_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    plan = read_fault_file(
        write(
            tmp_path,
            """
faults:
  - kill: {engine: both-1, at_s: 60}
  - stop: {engine: both-0, at_s: 50, until_s: 65}
  - slow: {engine: both-1, at_s: 30, until_s: 90, factor: 3}
  - partition: {engines: [both-0, both-1], at_s: 10, until_s: 20.5}
stats: {delay_s: 2}
restart_s: 30
""",
        )
    )
    assert plan.faults_of(SPEC, "f") == [
        Partition(10.0, 20.5, frozenset({"both-0", "both-1"})),
        SlowEngine(30.0, 90.0, "both-1", 3.0),
        StopEngine(50.0, 65.0, "both-0"),
        KillEngine(60.0, "both-1"),
    ]
    assert plan.changes() == {"stats_delay_s": 2.0, "restart_s": 30.0}


def test_the_example_of_the_modules_description_can_be_read(tmp_path: Path) -> None:
    description = fault_file.__doc__ or ""
    begin, end = description.index("    faults:"), description.index("Times are")
    plan = read_fault_file(write(tmp_path, description[begin:end]))
    assert len(plan.faults) == 4
    assert plan.changes() == {"stats_delay_s": 2.0, "stats_interval_s": 0.5, "restart_s": 30.0}


def test_an_empty_file_plans_nothing(tmp_path: Path) -> None:
    plan = read_fault_file(write(tmp_path, ""))
    assert (plan.faults_of(SPEC, "f"), plan.changes()) == ([], {})


def test_engines_that_the_cluster_does_not_have_are_named(tmp_path: Path) -> None:
    plan = read_fault_file(write(tmp_path, "faults: [{kill: {engine: decode-7, at_s: 1}}]"))
    with pytest.raises(InvalidConfig, match=r"^here: faults\.0: there is no engine 'decode-7'; .* has both-0, both-1$"):
        plan.faults_of(SPEC, "here")


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("faults: [{kill: {engine: a}}]", "faults.0.kill.at_s: Field required"),
        ("faults: [{kill: {engine: a, at_s: -1}}]", "faults.0.kill.at_s: Input should be greater than or equal to 0"),
        ("faults: [{kill: {engine: a, at_s: .nan}}]", "faults.0.kill.at_s: Input should be"),
        ("faults: [{kill: {engine: a, at_s: 1, until_s: 2}}]", "faults.0.kill.until_s: Extra inputs"),
        ("faults: [{stop: {engine: a, at_s: 2, until_s: 2}}]", "until_s is 2 and at_s 2: it has to end after"),
        ("faults: [{slow: {engine: a, at_s: 1, until_s: 2, factor: 0}}]", "faults.0.slow.factor: Input should be"),
        ("faults: [{partition: {engines: [], at_s: 1, until_s: 2}}]", "faults.0.partition.engines: Tuple should have"),
        ("faults: [{}]", "name one of kill, stop, slow and partition"),
        ("faults: [{kill: {engine: a, at_s: 1}, stop: {engine: a, at_s: 1, until_s: 2}}]", "name one of kill"),
        ("faults: 5", "faults: Input should be"),
        ("stats: {interval_s: 0}", "stats.interval_s: Input should be greater than 0"),
        ("- 1", "the file: Input should be a mapping with any of faults, stats, restart_s, and is a list"),
        ("faults: [", "it is not YAML"),
        (b"\xff", "it is not YAML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str | bytes, mistake: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_fault_file(write(tmp_path, text))
    assert mistake in str(caught.value)
    assert str(caught.value).startswith(f"--faults {tmp_path / 'faults.yaml'}: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        read_fault_file(tmp_path / "none")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=40), st.text("{}[]:- \n&*!a1.faultskil", max_size=60)))
def test_any_file_is_read_or_refused(tmp_path: Path, content: str | bytes) -> None:
    try:
        read_fault_file(write(tmp_path, content))
    except InvalidConfig as error:
        text = str(error)
    else:
        text = ""
    assert not text or text.startswith("--faults ")
