"""`raypd plan`: its inputs, its report and its errors.

Tests of cluster/commands/plan/model_kv.py, cluster/commands/plan/plan_inputs.py,
cluster/commands/plan/plan_report.py, cluster/commands/plan/plan_run.py.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from actors.config import SchedulerConfig
from actors.costs.cost_file import CostIdentity, save_cost_model
from actors.costs.step_cost_model import Residuals, StepCostModel
from cluster.cli import app
from cluster.commands.plan.plan_inputs import (
    SpeedSource,
    gpu_of_engines,
    offered_requests,
    read_cost_model,
    read_speed,
)
from cluster.commands.plan.plan_report import manifests_command
from cluster.errors import InvalidConfig
from cluster.planning.fleet_counts import FleetCounts
from cluster.traces.trace_request import TraceRequest
from tests.cluster.planning.plan_setup import COSTS
from tests.models.geometries import GEOMETRIES

MODEL = StepCostModel(COSTS, (Residuals("decode", 100, -0.1, 0.0, 0.1, 0.05), Residuals("prefill", 100)))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = (
        json.dumps({"timestamp": 100 * number, "input_length": 600, "output_length": 50, "hash_ids": [0, number + 1]})
        for number in range(400)
    )
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def cost_model(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    save_cost_model(path, CostIdentity("m", "cpu", "float32"), MODEL, 1.0, "e")
    return path


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_plan_from_a_saved_cost_model(trace: Path, cost_model: Path) -> None:
    result = _run(
        *("--trace", trace, "--slo", "ttft=1s,itl=50ms", "--cost-model", cost_model, "--kv-tokens", 100_000, "--json")
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert document["warning"] == ""
    fleet = document["plan"]["recommended"]["fleet"]
    assert sum(fleet.values()) >= document["plan"]["least_engines"] >= 1
    assert document["command"].startswith("raypd manifests --prefill ")


@pytest.mark.more
def test_fleets_of_a_plan_are_simulated_if_that_is_wanted(trace: Path, cost_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("planner: {estimate_requests: 20, max_estimates: 3}")
    speed = ("--cost-model", cost_model, "--kv-tokens", 100_000)
    result = _run("--config", config, "--trace", trace, "--slo", "ttft=1s,itl=50ms", *speed, "--simulate", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)["plan"]
    assert plan["estimated_by"] == "simulation"
    assert plan["recommended"]["service"]["attainment"] >= 0.9
    assert plan["recommended"]["growth"] >= 1.0
    assert plan["one_more"]["growth"] >= plan["recommended"]["growth"]


def test_a_plan_from_a_data_sheet_says_loudly_that_nothing_was_measured(trace: Path, tmp_path: Path) -> None:
    config = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    speed = ("--model", tmp_path, "--gpu", "h100")
    result = _run("--trace", trace, "--slo", "ttft=500ms,itl=50ms", *speed, "--budget", 16, "--scale-rate", 40)
    assert result.exit_code == 0, result.output
    assert result.output.count("NOTHING WAS MEASURED") == 1
    for part in ("perfect system:", "recommended", "one engine more", f"--model {tmp_path} --gpu h100"):
        assert part in result.output
    # A factor of four between the shortest and the longest steps takes more than one number of engines.
    assert re.search(
        r"confidence: none, as nothing was measured; \d to \d engines, if steps take from half", result.output
    )
    assert "links twice as fast buy nothing: engines for both keep requests" in result.output


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (("--slo", "ttft=1s"), "give --cost-model, or --op-tables, or --model together with --gpu"),
        (("--slo", "tpot=1s"), "tpot: a plan can be made for ttft and itl"),
        (("--slo", "ttft=1s", "--tp", "4", "--budget", "2"), "2 GPUs are too few for one engine, which takes 4"),
        (("--slo", "ttft=1s", "--op-tables", "x"), "needs --shape"),
        (("--slo", "ttft=1s", "--op-tables", "x", "--cost-model", "y"), "either --cost-model or --op-tables"),
        (("--slo", "ttft=1s", "--cost-model", "missing.json"), "it cannot be read: No such file"),
    ],
)
def test_mistakes_are_refused_with_what_to_do(trace: Path, arguments: tuple[str, ...], mistake: str) -> None:
    result = _run("--trace", trace, *arguments)
    assert result.exit_code != 0
    assert mistake in " ".join(result.output.split())


def test_a_cost_model_needs_the_size_of_the_kv_cache(trace: Path, cost_model: Path) -> None:
    result = _run("--trace", trace, "--slo", "ttft=1s", "--cost-model", cost_model)
    assert result.exit_code != 0
    assert "give --kv-tokens, or --model and --gpu" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "kv_bytes", "num_state_tokens"),
    [
        ("Llama-3.3-70B", 327_680, 0),
        ("DeepSeek-V3", 70_272, 0),
        ("Gemma 4 31B", 901_120, 0),
        # The 77 856 768 bytes of a request's state are those of as many tokens.
        ("Qwen3-Next-80B", 24_576, 3168),
    ],
)
def test_measured_steps_go_with_the_kv_that_the_model_keeps(
    cost_model: Path, tmp_path: Path, name: str, kv_bytes: int, num_state_tokens: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEOMETRIES[name]))
    speed, warning = read_speed(_source(tmp_path, cost_model=cost_model, num_kv_tokens=100_000), SchedulerConfig())
    assert (speed.kv_bytes_per_token, speed.num_state_tokens, warning) == (kv_bytes, num_state_tokens, "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DeepSeek-V3", "latent attention has no estimate; give measured times"),
        ("Gemma 4 31B", "its layers keep KV of different shapes, or share it"),
        ("Qwen3-Next-80B", "some of its layers keep recurrent states"),
    ],
)
def test_steps_of_a_model_whose_layers_differ_are_not_guessed(tmp_path: Path, name: str, reason: str) -> None:
    config = GEOMETRIES[name] | {"intermediate_size": 8192, "vocab_size": 100_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidConfig, match=reason):
        read_speed(_source(tmp_path, gpu="h100"), SchedulerConfig())


@pytest.mark.parametrize(
    ("config", "mistake"),
    [
        (None, "is not a checkpoint in Hugging Face format"),
        ("{}", "it does not say how large the KV of a token is"),
        ('{"num_hidden_layers": "many"}', "a size is no number"),
    ],
)
def test_a_config_that_says_nothing_of_kv_is_refused(
    cost_model: Path, tmp_path: Path, config: str | None, mistake: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidConfig, match=mistake):
        read_speed(_source(tmp_path, cost_model=cost_model, num_kv_tokens=100_000), SchedulerConfig())


def _source(
    model: Path, *, gpu: str | None = None, cost_model: Path | None = None, num_kv_tokens: int | None = None
) -> SpeedSource:
    return SpeedSource(model, gpu, cost_model, None, None, 1, num_kv_tokens, 100.0)


def test_a_file_that_is_no_cost_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"identity": 3}')
    with pytest.raises(InvalidConfig, match="it is no saved cost model"):
        read_cost_model(path)


def test_a_prefix_that_the_cache_still_holds_is_cached() -> None:
    def request(index: int, *blocks: int) -> TraceRequest:
        return TraceRequest(str(index), float(index), 512 * len(blocks), 10, blocks)

    trace = [request(0, 1, 2), request(1, 1, 2), request(2, 1, 3), request(3, 7, 8), request(4, 1, 2)]
    assert [one.num_cached_tokens for one in offered_requests(trace, 4)] == [0, 1023, 512, 0, 512]
    assert [one.num_cached_tokens for one in offered_requests(trace, 100)] == [0, 1023, 512, 0, 1023]
    assert [one.arrived_at_s for one in offered_requests(trace, 100, rate_scale=2.0)] == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_without_ids_of_blocks_as_much_is_cached_as_when_the_request_was_recorded() -> None:
    trace = [
        TraceRequest("0", 0.0, 600, 10, num_cached_tokens=96),
        TraceRequest("1", 1.0, 600, 10, (1, 2), num_cached_tokens=96),
        TraceRequest("2", 2.0, 600, 10, num_cached_tokens=9999),
    ]
    assert [one.num_cached_tokens for one in offered_requests(trace, 100)] == [96, 0, 599]


def test_the_command_names_what_differs_from_a_plain_cluster() -> None:
    command = manifests_command(FleetCounts(2, 3), "/m", "h100", 2)
    assert command == "raypd manifests --prefill 2 --decode 3 --both 0 --model /m --gpu h100 --tp 2"
    assert manifests_command(FleetCounts(both=1), "/m n", None, 1, Path("one.yaml")) == (
        "raypd manifests --config one.yaml --prefill 0 --decode 0 --both 1 --model '/m n'"
    )


@pytest.mark.parametrize(
    ("gpu", "device", "expected"),
    [
        ("NVIDIA H100", None, "h100"),
        ("rtx4090", None, "any"),  # it has a data sheet, and manifests know no node label of it
        (None, "NVIDIA H200", "h200"),
        (None, "NVIDIA A10G", "any"),
        (None, "AMD EPYC 9B14, 2 threads", None),
        (None, None, "any"),  # tables of operators
    ],
)
def test_the_command_asks_for_the_gpu_whose_speed_was_read(
    tmp_path: Path, gpu: str | None, device: str | None, expected: str | None
) -> None:
    costs = None
    if device is not None:
        costs = tmp_path / "costs.json"
        save_cost_model(costs, CostIdentity("m", device, "bf16"), MODEL, 1.0, "e")
    assert gpu_of_engines(_source(tmp_path, gpu=gpu, cost_model=costs)) == expected


def test_the_printed_command_prints_the_manifests_of_the_fleet(trace: Path, cost_model: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings of mine.yaml"
    settings.write_text("{both: {count: 9}, prefill: {count: 7}, scheduler: {max_num_seqs: 48}}")
    speed = ("--cost-model", cost_model, "--kv-tokens", 100_000, "--gpu", "l4", "--model", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GEOMETRIES["Llama-3.3-70B"]))
    planned = _run("--config", settings, "--trace", trace, "--slo", "ttft=1s,itl=50ms", *speed, "--json")
    assert planned.exit_code == 0, planned.output
    document = json.loads(planned.output)

    found = CliRunner().invoke(app, shlex.split(document["command"])[1:])

    assert found.exit_code == 0, found.output
    [config] = [
        yaml.safe_load(one["data"]["cluster.yaml"])
        for one in yaml.safe_load_all(found.stdout)
        if "cluster.yaml" in one.get("data", {})
    ]
    counts = {role: config.get(role, {"count": 0})["count"] for role in ("prefill", "decode", "both")}
    assert counts == document["plan"]["recommended"]["fleet"]
    assert config["scheduler"]["max_num_seqs"] == 48
