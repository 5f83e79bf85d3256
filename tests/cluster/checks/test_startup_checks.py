"""Anything that would stop a start is reported before anything is loaded, with the file, the port or the figures.

Tests of cluster/cli.py, cluster/commands/serve.py, cluster/settings/ingress.py, cluster/commands/command_line.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.checks.startup_checks import find_ingress_mistakes, find_memory_mistakes, refuse_bad_node, refuse_bad_start
from cluster.cli import app
from cluster.config import DEMO_MODEL, ClusterConfig
from cluster.errors import InvalidConfig
from cluster.settings.ingress import IngressConfig
from tests.cluster.access.certificates import Authority

_GIB = 1 << 30


def _config(**settings: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(settings)


def test_a_machine_with_everything_is_not_refused() -> None:
    refuse_bad_start(_config(ingress={"port": 0}))


def test_each_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = [listening.getsockname()[1] for listening in (first, second)]
        mistakes = find_ingress_mistakes(IngressConfig.model_validate({"port": ports[0], "http": {"port": ports[1]}}))
    assert len(mistakes) == 2
    for port, mistake in zip(ports, mistakes, strict=True):
        assert f"cannot listen at 127.0.0.1:{port}: another process listens there already" in mistake


def test_the_ports_of_further_ingresses_are_looked_at_as_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ingress = IngressConfig.model_validate({"port": port - 1, "http": None})
        of_one, of_two = find_ingress_mistakes(ingress), find_ingress_mistakes(ingress, num_ingresses=2)
    # Somebody else may have the port before it.
    assert not any(f"127.0.0.1:{port}:" in mistake for mistake in of_one)
    assert any(f"127.0.0.1:{port}:" in mistake for mistake in of_two)


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    ingress = IngressConfig.model_validate({"host": "192.0.2.1", "port": 5, "http": None, "insecure": True})
    [mistake] = find_ingress_mistakes(ingress)
    assert "192.0.2.1:5" in mistake


def _tls(**files: Path) -> IngressConfig:
    return IngressConfig.model_validate({"port": 0, "tls": files})


def test_a_missing_file_of_tls_is_named(tmp_path: Path) -> None:
    good = Authority(tmp_path, "root").certify("server")
    missing = tmp_path / "nothing.pem"
    assert find_ingress_mistakes(_tls(certificate=good.certificate, key=good.key)) == []
    for name in ("certificate", "key", "client_ca"):
        files = {"certificate": good.certificate, "key": good.key} | {name: missing}
        assert find_ingress_mistakes(_tls(**files)) == [
            f"ingress.tls.{name}: {missing} cannot be read: No such file or directory"
        ]


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "root")
    one, other = authority.certify("one"), authority.certify("other")
    [mistake] = find_ingress_mistakes(_tls(certificate=one.certificate, key=other.key))
    assert mistake.startswith("ingress.tls: cannot be used: ")
    assert str(other.key) in mistake


@pytest.mark.parametrize("content", [b"tokens: [", b"\xff\xfe\x00nothing", b"tokens: 5"])
def test_a_broken_token_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_bytes(content)
    mistakes = find_ingress_mistakes(IngressConfig(port=0, tokens=file))
    assert mistakes
    assert all(mistake.startswith(f"ingress.tokens: {file}: ") for mistake in mistakes)


def test_a_directory_for_the_request_trace_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory, mistakes in (
        (tmp_path / "new" / "deep", []),
        (tmp_path / "file" / "deep", [f"ingress.request_trace.directory: {tmp_path / 'file'} is not a directory"]),
    ):
        ingress = IngressConfig.model_validate({"port": 0, "http": None, "request_trace": {"directory": directory}})
        assert find_ingress_mistakes(ingress) == mistakes
    assert not (tmp_path / "new").exists()


def test_tracing_without_its_extra_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = IngressConfig.model_validate({"port": 0, "http": None, "tracing": {}})
    exporter = "opentelemetry.exporter.otlp.proto.http"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    mistake = f"ingress.tracing needs {exporter}: pip install 'raypd[otel]', or leave tracing out"
    assert find_ingress_mistakes(ingress) == [mistake]

    def find_no_parent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.util.find_spec", find_no_parent)
    assert find_ingress_mistakes(ingress) == [mistake]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert find_ingress_mistakes(ingress) == []


def test_kv_caches_that_do_not_fit_together_are_refused_with_the_figures() -> None:
    settings: dict[str, Any] = {
        "cache": {"kv_cache_memory_gib": 6},
        "prefill": {"count": 1},
        "decode": {"count": 2, "cache": {"kv_cache_memory_gib": 2.5}},
    }
    assert find_memory_mistakes(_config(**settings), free_bytes=11 * _GIB) == []
    [mistake] = find_memory_mistakes(_config(**settings), free_bytes=int(10.97 * _GIB))
    assert "need 11 GiB (1 x 6 GiB for prefill engines, 2 x 2.5 GiB for decode engines)" in mistake
    assert mistake.endswith("and 10.9 GiB are free: lower it, or start fewer engines")


def test_each_rank_has_a_cache_and_caches_on_gpus_are_left_out() -> None:
    settings: dict[str, Any] = {
        "cache": {"kv_cache_memory_gib": 1},
        "parallel": {"tensor_parallel_size": 2},
        "prefill": {"count": 1},
        "decode": {"count": 1, "num_gpus": 1},
    }
    assert find_memory_mistakes(_config(**settings), free_bytes=2 * _GIB) == []
    [mistake] = find_memory_mistakes(_config(**settings), free_bytes=2 * _GIB - 1)
    assert "need 2 GiB (2 x 1 GiB for prefill engines)" in mistake


def test_every_mistake_is_said_at_once(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidConfig) as refused:
        refuse_bad_start(_config(ingress={"port": taken.getsockname()[1], "http": None, "tokens": str(missing)}))
    assert len(refused.value.mistakes) == 2


async def test_an_ingress_waits_a_moment_for_the_port_of_the_one_before_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ingress = IngressConfig.model_validate({"port": taken.getsockname()[1], "http": None})
        with pytest.raises(InvalidConfig, match=r"node .*another process listens there already"):
            await refuse_bad_node(ingress, port_timeout_s=0.0)
        waiting = asyncio.create_task(refuse_bad_node(ingress, port_timeout_s=60.0))
        await asyncio.sleep(0)
    await waiting


_Spoil = Callable[[Path], dict[str, Any]]


def _model(change: Callable[[Path], object]) -> _Spoil:
    """Serve a copy of the demo model that was changed."""

    def spoil(directory: Path) -> dict[str, Any]:
        shutil.copytree(DEMO_MODEL, directory / "model")
        change(directory / "model")
        return {"model": {"model": str(directory / "model")}}

    return spoil


def _edit_config(**settings: object) -> Callable[[Path], object]:
    def edit(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | settings))

    return edit


def _with_tokens(directory: Path) -> dict[str, Any]:
    (directory / "tokens.yaml").write_text("tokens: 7")
    return {"ingress": {"tokens": str(directory / "tokens.yaml")}}


def _with_wrong_certificate(directory: Path) -> dict[str, Any]:
    (directory / "server.crt").write_text("no certificate")
    (directory / "server.key").write_text("no key")
    files = {"certificate": str(directory / "server.crt"), "key": str(directory / "server.key")}
    return {"ingress": {"tls": files}}


FOUND_BEFORE: dict[str, tuple[_Spoil, str]] = {
    "no certificate": (
        lambda d: {"ingress": {"tls": {"certificate": f"{d}/none.crt", "key": f"{d}/none.key"}}},
        "none.crt cannot be read: No such file",
    ),
    "a broken certificate": (_with_wrong_certificate, "ingress.tls: "),
    "a broken token file": (_with_tokens, "ingress.tokens: "),
    "no cluster secret": (lambda d: {"cluster_secret_file": f"{d}/none"}, "cluster_secret_file: "),
    "more KV than memory": (lambda d: {"cache": {"kv_cache_memory_gib": 1e6}}, "cache.kv_cache_memory_gib: the KV cac"),
    "no model": (lambda d: {"model": {"model": f"{d}/none"}}, "/none' does not exist"),
    "no tokenizer": (_model(lambda m: (m / "tokenizer.json").unlink()), "has no tokenizer"),
    "a broken tokenizer": (_model(lambda m: (m / "tokenizer.json").write_text("{")), "was cut short"),
    "weights cut short": (_model(lambda m: os.truncate(m / "model.safetensors", 9000)), "by its header it should have"),
    "a generation config that is no JSON": (
        _model(lambda m: (m / "generation_config.json").write_text("{")),
        "generation_config.json",
    ),
    "a config of a wrong type": (_model(_edit_config(hidden_size="64")), "'hidden_size' expected int, got str"),
    "a model that is not served": (_model(_edit_config(model_type="mamba")), "recurrent state"),
    "no adapter": (lambda d: {"lora": {"adapters": {"sql": f"{d}/none"}}}, "lora.adapters.sql: "),
}


@pytest.mark.parametrize("what", FOUND_BEFORE)
def test_serve_says_before_it_starts_ray_what_a_start_would_fail_for(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("cluster.start.local_ray.connect", lambda config: pytest.fail("Ray was started"))
    spoil, mistake = FOUND_BEFORE[what]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(spoil(tmp_path)))

    result = CliRunner().invoke(app, ["serve", "--port", "0", "--config", str(tmp_path / "cluster.yaml")])

    assert result.exit_code in (1, 2), result.output
    assert mistake in result.output
    assert "Traceback" not in result.output


def test_serve_says_so_before_it_starts_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("cluster.start.local_ray.connect", lambda config: pytest.fail("Ray was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(app, ["serve", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 1
    assert "another process listens there already" in result.output


@pytest.mark.parametrize("content", [b"\xff\xfe\xfa\xfb", b"model: \x80"])
def test_settings_that_are_no_text_are_no_yaml(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_bytes(content)
    result = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert result.exit_code == 2
    assert f"{file}: is not YAML" in " ".join(result.output.split())
