"""`raypd doctor` as it is typed.

Tests of cluster/commands/deploy.py, cluster/commands/doctor/examination.py.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from cluster.access.certificate_dates import find_certificate_warnings
from cluster.access.server_tls import TlsConfig
from cluster.cli import app
from cluster.commands.doctor import examination as doctor_command
from cluster.commands.doctor import node as node_module
from cluster.commands.doctor.findings import Finding
from cluster.config import DEMO_MODEL
from tests.cluster.access.certificates import Authority


@pytest.fixture(autouse=True)
def no_child_process_and_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "_probe_devices", lambda: {"torch": "2.13.0"})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_node_that_can_serve_ends_well() -> None:
    result = CliRunner().invoke(app, ["doctor"])

    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("ok       model files: demo_model: 4 million parameters, bfloat16")
    assert any(line.startswith("ok       memory of decode engines: the engine has ") for line in lines)


def test_what_stands_in_the_way_ends_badly_and_can_be_read_by_programs(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--model", str(tmp_path), "--json"])

    assert result.exit_code == 1
    findings = {finding["check"]: finding for finding in json.loads(result.output)}
    assert findings["model files"]["verdict"] == "failure"
    assert not [check for check in findings if check.startswith("memory")]


def test_a_model_is_planned_for_gpus_that_are_elsewhere() -> None:
    result = CliRunner().invoke(app, ["doctor", "--model", str(DEMO_MODEL), "--tp", "2", "--gpu", "h200"])

    assert result.exit_code == 0, result.output
    assert "memory of decode engines: each of 2 ranks has 139.8 GiB" in result.output
    assert "/dev/shm" not in result.output


def test_heads_that_cannot_be_shared_are_said() -> None:
    result = CliRunner().invoke(app, ["doctor", "--tp", "3"])

    assert result.exit_code == 1
    assert "its 4 attention heads cannot be shared evenly by 3 ranks" in result.output


def test_what_serve_refuses_is_a_failure_and_no_traceback(tmp_path: Path) -> None:
    whole = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, whole)
    for model_type, reason in (("mamba", "recurrent state"), ("deepseek_v32", "MLA")):
        CONFIG_MAPPING[model_type]().save_pretrained(whole)

        result = CliRunner().invoke(app, ["doctor", "--model", str(whole)])

        assert result.exit_code == 1
        assert reason in result.output
        assert not isinstance(result.exception, ZeroDivisionError)


def test_a_gpu_that_is_not_known_is_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "--gpu", "h300"])

    assert result.exit_code == 1
    assert "--gpu: 'h300' is not a known kind of GPU; choose one of a100, h100, h200, b200, l40s" in result.output


def test_what_serve_would_say_of_this_machine_doctor_says_too(tmp_path: Path) -> None:
    (tmp_path / "tokens.yaml").write_bytes(b"\xff\xfe")
    settings = tmp_path / "cluster.yaml"
    settings.write_text(
        f"ingress: {{tokens: {tmp_path}/tokens.yaml, tls: {{certificate: {tmp_path}/none.pem, key: {tmp_path}/key}}}}\n"
        "cache: {kv_cache_memory_gib: 1000000}\n"
    )

    result = CliRunner().invoke(app, ["doctor", "--config", str(settings)])

    assert result.exit_code == 1
    assert f"failure  files: ingress.tls.certificate: {tmp_path}/none.pem cannot be read" in result.output
    assert f"failure  files: ingress.tokens: {tmp_path}/tokens.yaml: " in result.output
    assert "failure  memory: cache.kv_cache_memory_gib: the KV caches need " in result.output


def test_a_certificate_that_has_expired_is_a_warning(tmp_path: Path) -> None:
    files = Authority(tmp_path, "root").certify("server")
    expired = find_certificate_warnings(
        TlsConfig(certificate=files.certificate, key=files.key), datetime(2101, 1, 1, tzinfo=UTC)
    )
    settings = tmp_path / "cluster.yaml"
    settings.write_text(f"ingress: {{tls: {{certificate: {files.certificate}, key: {files.key}}}}}\n")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(doctor_command, "find_certificate_warnings", lambda tls: expired)
        result = CliRunner().invoke(app, ["doctor", "--config", str(settings)])

    assert f"warning  certificate: {expired[0]}" in result.output
    assert "expired at 2100-01-01" in result.output


def test_a_draft_model_of_another_vocabulary_is_said(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config | {"vocab_size": 77}))
    settings = tmp_path / "cluster.yaml"
    settings.write_text(f"scheduler: {{speculative: {{method: draft_model, model: {tmp_path}/draft}}}}\n")

    for command in (["doctor"], ["serve"]):
        result = CliRunner().invoke(app, [*command, "--config", str(settings)])

        assert result.exit_code != 0
        assert "scheduler.speculative.model: " in result.output
        assert "cannot be the draft model: it has 77 tokens" in result.output


def test_what_the_model_is_refused_for_is_said_before_anything_else_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CONFIG_MAPPING["mamba"]().save_pretrained(tmp_path)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    shutil.copy(DEMO_MODEL / "model.safetensors", tmp_path)
    monkeypatch.setattr(doctor_command, "check_tokenizer", _fail)

    result = CliRunner().invoke(app, ["doctor", "--model", str(tmp_path)])

    assert isinstance(result.exception, AssertionError), "it came to the tokenizer"
    assert "mamba cannot be served" in result.output


def _fail(*args: object, **settings: object) -> Finding:
    raise AssertionError("not yet")
