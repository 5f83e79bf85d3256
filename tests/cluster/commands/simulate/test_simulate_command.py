"""Simulated clusters serve traces, and the figures are shown and written.

Tests of cluster/commands/simulate/simulate_command.py, cluster/commands/simulate/simulated_config.py,
cluster/commands/simulate/simulation_jobs.py, cluster/commands/simulate/simulation_plots.py and
cluster/commands/simulate/simulation_report.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from actors.costs.cost_file import CostIdentity, save_cost_model
from actors.costs.step_cost_model import StepCostModel
from cluster.cli import app
from cluster.commands.simulate.simulated_config import EngineSource, cluster_of
from cluster.commands.simulate.simulation_jobs import SimulationJob, run_jobs
from cluster.config import ClusterConfig, load_cluster_config
from cluster.errors import InvalidConfig
from tests.models.geometries import GEOMETRIES

COSTS = StepCostModel((5e-3, 2e-5, 1e-5, 2e-5, 1e-5, 0.0, 1e-5, 1e-7, 1e-3, 1e-8, 2e-9))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a trace of 40 requests, a cost model, and the settings of two clusters."""
    rows = [{"timestamp": 100 * index, "input_length": 600, "output_length": 8} for index in range(40)]
    (tmp_path / "trace.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    save_cost_model(tmp_path / "cost.json", CostIdentity("m", "d", "bf16"), COSTS, 1.7e9, "both-0")
    for name, counts in (("split", {"prefill": 1, "decode": 1}), ("mixed", {"both": 2, "prefill": 0, "decode": 0})):
        settings: dict[str, Any] = {role: {"count": count} for role, count in counts.items()}
        settings |= {"slo": {"ttft_ms": 500, "itl_ms": 100}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def simulate(files: Path, *options: str) -> Result:
    given = ["--trace", str(files / "trace.jsonl"), "--cost-model", str(files / "cost.json"), "--kv-tokens", "100000"]
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["simulate", *given, *options])


def test_several_clusters_and_rates_are_compared_in_a_table_of_80_columns_and_in_a_file(files: Path) -> None:
    result = simulate(
        files,
        *("-c", str(files / "split.yaml"), "-c", str(files / "mixed.yaml")),
        *("--scale-rate", "1", "--scale-rate", "2", "--json", str(files / "out.json")),
    )
    assert result.exit_code == 0, result.output
    *shown, written = result.stdout.splitlines()
    assert max(map(len, shown)) <= 80
    assert written == f"written to {files / 'out.json'}"
    assert [line.split()[0] for line in result.stdout.splitlines() if line.split()[:1] in (["split"], ["mixed"])] == [
        *("split", "split"),
        *("mixed", "mixed"),
    ]
    runs = json.loads((files / "out.json").read_text())["runs"]
    assert [(run["config"], run["scale_rate"]) for run in runs] == [
        *(("split", 1.0), ("split", 2.0)),
        *(("mixed", 1.0), ("mixed", 2.0)),
    ]
    assert all(run["outcomes"] == {"complete": 40} and run["good_share"] == 1.0 for run in runs)
    assert [round(run["offered_per_s"], 2) for run in runs] == [10.26, 20.51, 10.26, 20.51]
    assert runs[0]["engines"] == [{"at_s": 0.0, "prefill": 1, "decode": 1, "both": 0, "starting": 0}]
    assert 0 < runs[0]["ttft_s"]["p50"] <= runs[0]["ttft_s"]["p99"] < 0.5


def test_several_traces_are_served_by_each_cluster(files: Path) -> None:
    rows = [{"timestamp": 500 * index, "input_length": 100, "output_length": 2} for index in range(10)]
    (files / "quiet.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = simulate(
        files,
        *("--trace", str(files / "quiet.jsonl"), "--json", str(files / "out.json")),
        *("-c", str(files / "split.yaml"), "-c", str(files / "mixed.yaml")),
    )
    assert result.exit_code == 0, result.output
    runs = json.loads((files / "out.json").read_text())["runs"]
    assert [(run["config"], Path(run["trace"]).stem, run["requests"]) for run in runs] == [
        *(("split", "trace", 40), ("split", "quiet", 10)),
        *(("mixed", "trace", 40), ("mixed", "quiet", 10)),
    ]
    assert "quiet" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80


def test_plots_are_drawn_and_the_same_simulation_draws_the_same_bytes(files: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra raypd[plan] is not installed")
    drawn = []
    for name in ("once", "again"):
        result = simulate(files, "-c", str(files / "split.yaml"), "--plots", str(files / "plots" / name))
        assert result.exit_code == 0, result.output
        assert f"drawn into {files / 'plots' / name / 'goodput.png'}" in result.stdout
        drawn.append({path.name: path.read_bytes() for path in (files / "plots" / name).iterdir()})
    assert set(drawn[0]) == {"goodput.png", "ttft.png", "itl.png", "engines.png"}
    assert all(data.startswith(b"\x89PNG") for data in drawn[0].values())
    assert drawn[0] == drawn[1]


def test_without_matplotlib_the_extra_is_named_before_anything_is_simulated(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = simulate(files, "-c", str(files / "split.yaml"), "--plots", str(files / "plots"))
    assert result.exit_code != 0
    assert "--plots: plots need matplotlib: pip install 'raypd[plan]'" in result.output
    assert "TTFT" not in result.stdout
    assert not (files / "plots").exists()


def slow_down(engine_id: str) -> dict[str, Any]:
    return {"slow": {"engine": engine_id, "at_s": 0, "until_s": 100, "factor": 30}}


def test_faults_are_played(files: Path) -> None:
    (files / "faults.yaml").write_text(
        yaml.safe_dump({"faults": [slow_down(name) for name in ("prefill-0", "decode-0")]})
    )
    config = ("-c", str(files / "split.yaml"))
    good, slow = (
        json.loads((files / "out.json").read_text())["runs"][0]
        for faults in ((), ("--faults", str(files / "faults.yaml")))
        if simulate(files, *config, *faults, "--json", str(files / "out.json")).exit_code == 0
    )
    assert slow["ttft_s"]["p50"] > 2 * good["ttft_s"]["p50"]


def test_simulations_in_processes_of_their_own_find_what_one_process_finds(files: Path) -> None:
    source = EngineSource(cost_model=files / "cost.json", num_kv_tokens=100_000)
    jobs = [
        SimulationJob(config=files / f"{name}.yaml", trace=files / "trace.jsonl", source=source, seed=3)
        for name in ("split", "mixed")
    ]
    assert dict(run_jobs(jobs, 2)) == dict(run_jobs(jobs, 1))


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        (["--faults", "{files}/none"], "--faults {files}/none: it cannot be read: No such file"),
        (["--faults", "{files}/bad.yaml"], "there is no engine 'decode-9'; this cluster has decode-0, prefill-0"),
        (["--op-tables", "{files}"], "give either --cost-model, or --op-tables and --shape"),
        (["--trace", "{files}/none"], "--trace {files}/none: it cannot be read: No such file"),
        (["-c", "{files}/none"], "none"),
        (["--json", "{files}/no/out.json"], "--json {files}/no/out.json: it cannot be written"),
    ],
)
def test_a_mistake_is_named(files: Path, options: list[str], mistake: str) -> None:
    (files / "bad.yaml").write_text("faults: [{kill: {engine: decode-9, at_s: 1}}]")
    result = simulate(files, *(option.format(files=files) for option in options))
    assert result.exit_code in (1, 2)
    assert mistake.format(files=files) in result.output
    assert "Traceback" not in result.output


_ROW = '{"timestamp": 5000, "input_length": 600, "output_length": 8}\n'
_OWN = '{"raypd_request_trace": 1, "began_at_s": 1.0, "ingress": "i", "part": 1}\n'
_OWN_ROW = '{"number": 1, "request_id": "a", "arrival_s": 0.5, "outcome": "stop", "num_prompt_tokens": 9}\n'


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (_ROW + _ROW.replace("5000", "NaN"), "line 2: JSON is malformed"),
        (_ROW + _ROW.replace("600", "-600"), "line 2: Expected `int` >= 1"),
        (_ROW + _ROW.replace("5000", "4000"), "line 2: its time is before that of the line above"),
        (_ROW + _ROW.replace("600", "1000000000"), "line 2: Expected `int` <= 10000000"),
        (_ROW + " " * (5 << 20), "line 2: it is longer than 4194304 bytes"),
        (_OWN + _OWN_ROW + _OWN_ROW, "line 3: request number 1 is in line 2 already"),
    ],
)
def test_a_bad_line_of_a_trace_is_refused_with_its_file_and_line(files: Path, text: str, mistake: str) -> None:
    (files / "trace.jsonl").write_text(text)
    result = simulate(files, "--json", str(files / "out.json"))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"raypd: --trace {files / 'trace.jsonl'}: {mistake}")
    assert not (files / "out.json").exists(), "nothing was simulated"


def test_the_size_of_the_kv_cache_has_to_be_known(files: Path) -> None:
    source = EngineSource(cost_model=files / "cost.json")
    with pytest.raises(InvalidConfig, match=r"give --kv-tokens, or cache\.kv_cache_memory_gib"):
        cluster_of(ClusterConfig(), source)
    sized = load_cluster_config(None, {"cache": {"num_blocks": 320, "block_size": 16}})
    assert {engine.num_blocks for engine in cluster_of(sized, source).engines} == {10}


@pytest.mark.parametrize(
    ("name", "kv_bytes", "state_bytes"), [("DeepSeek-V3", 70_272, 0), ("Qwen3-Next-80B", 24_576, 77_856_768)]
)
def test_handoffs_move_what_the_model_keeps(files: Path, name: str, kv_bytes: int, state_bytes: int) -> None:
    (files / "config.json").write_text(json.dumps(GEOMETRIES[name]))
    config = load_cluster_config(files / "split.yaml", {"model": {"model": str(files)}}, looks_at_model=False)
    spec = cluster_of(config, EngineSource(cost_model=files / "cost.json", num_kv_tokens=5120))
    assert (spec.kv_bytes_per_token, spec.state_bytes) == (kv_bytes, state_bytes)


def test_the_simulated_cluster_is_that_of_the_settings(files: Path) -> None:
    config = load_cluster_config(files / "split.yaml", {"ingress": {"count": 2}, "routing": {"mode": "disaggregate"}})
    spec = cluster_of(config, EngineSource(cost_model=files / "cost.json", num_kv_tokens=5120, link_gbit_per_s=8.0))
    assert [(engine.engine_id, engine.num_blocks) for engine in spec.engines] == [("prefill-0", 10), ("decode-0", 10)]
    assert (spec.links.bytes_per_s, spec.num_ingresses, spec.routing_mode.value) == (1e9, 2, "disaggregate")
    assert (spec.slo.ttft_s, spec.slo.itl_s) == (0.5, 0.1)
    assert {engine.itl_s for engine in spec.engines} == {0.1}
    assert (spec.longest_drain_s, spec.restarts) == (config.drain_timeout_s, config.restarts)
