"""Files of secrets and certificates that cannot be used are said before Ray starts, with setting, file and advice."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from rich.console import Console
from typer.testing import CliRunner

from cluster.checks.internal_files import InternalFiles
from cluster.checks.startup_checks import refuse_bad_start
from cluster.cli import app
from cluster.config import ClusterConfig
from cluster.errors import InvalidConfig
from cluster.start import local_ray
from cluster.start.running import start_detached
from kv_transfer.trust.authority import draw_tls_material
from tests.kv_transfer.trust.certificates import certified, write_tls_files

_SETTINGS = ("cluster_secret_file", "block_hash_key_file")


def _secret(directory: Path, name: str = "secret", mode: int = 0o600) -> Path:
    path = directory / name
    path.write_text("5a" * 32)
    path.chmod(mode)
    return path


def _config(**settings: object) -> ClusterConfig:
    return ClusterConfig.model_validate({"ingress": {"port": 0}, **settings})


def _settings_of(directory: Path) -> dict[str, object]:
    files = write_tls_files(directory, draw_tls_material())
    tls = {"ca": files.authority, "certificate": files.certificate, "key": files.key}
    return {name: str(_secret(directory, name)) for name in _SETTINGS} | {"internal_tls": tls}


def test_files_that_can_be_used_and_settings_without_files_have_no_mistakes(tmp_path: Path) -> None:
    assert InternalFiles.of(_config()).find_mistakes() == []
    assert InternalFiles.of(_config(internal_tls=True)).find_mistakes() == []
    assert InternalFiles.of(_config(**_settings_of(tmp_path))).find_mistakes() == []


@pytest.mark.parametrize("setting", _SETTINGS)
def test_a_missing_file_is_named_with_how_to_make_one(tmp_path: Path, setting: str) -> None:
    path = tmp_path / "nothing"
    [mistake] = InternalFiles.of(_config(**{setting: str(path)})).find_mistakes()
    assert mistake.startswith(f"{setting}: {path}: cannot be read: No such file or directory; create it with `openssl")


@pytest.mark.parametrize("setting", _SETTINGS)
def test_a_file_that_others_can_read_is_named_with_what_to_do(tmp_path: Path, setting: str) -> None:
    path = _secret(tmp_path, mode=0o644)
    [mistake] = InternalFiles.of(_config(**{setting: str(path)})).find_mistakes()
    assert mistake == f"{setting}: {path}: has mode 0644, so others can use it; chmod 0600 (or 0440 for a group)"


def test_a_file_with_something_else_is_refused_without_its_content(tmp_path: Path) -> None:
    path = _secret(tmp_path)
    path.write_text("hunter2\n")
    [mistake] = InternalFiles.of(_config(cluster_secret_file=str(path))).find_mistakes()
    assert mistake == f"cluster_secret_file: {path}: line 1 is not 64 hexadecimal digits"


def _without_key(directory: Path) -> str:
    (directory / "tls.key").unlink()
    return "tls.key cannot be read: No such file or directory"


def _open_key(directory: Path) -> str:
    (directory / "tls.key").chmod(0o644)
    return "tls.key: has mode 0644, so others can use it"


def _expired(directory: Path) -> str:
    write_tls_files(directory, certified(ends_in=datetime.timedelta(days=-1)))
    return "certificate has expired; it has to be of this authority, valid now"


@pytest.mark.parametrize("spoil", [_without_key, _open_key, _expired])
def test_certificates_that_cannot_be_used_are_refused(tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    settings = _settings_of(tmp_path)
    says = spoil(tmp_path)
    [mistake] = InternalFiles.of(_config(**settings)).find_mistakes()
    assert mistake.startswith("internal_tls: ")
    assert says in mistake


def test_every_mistake_is_said_at_once_before_anything_starts(tmp_path: Path) -> None:
    settings = _settings_of(tmp_path)
    for name in (*_SETTINGS, "ca.crt"):
        (tmp_path / name).unlink()
    with pytest.raises(InvalidConfig) as refused:
        refuse_bad_start(_config(**settings))
    assert [mistake.split(":")[0] for mistake in refused.value.mistakes] == [*_SETTINGS, "internal_tls"]


def test_a_cluster_that_is_left_running_is_refused_before_ray_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(config: ClusterConfig) -> ClusterConfig:
        raise AssertionError("it joined Ray")

    monkeypatch.setattr(local_ray, "connect", join)
    config = _config(ray={"address": "192.0.2.1:6379"}, cluster_secret_file=str(tmp_path / "nothing"))
    with pytest.raises(InvalidConfig, match="cluster_secret_file"):
        start_detached(config, Console(quiet=True))


def _without_file(directory: Path) -> tuple[str, str]:
    """Settings that name a file that is not there, and what is to be said."""
    file, missing = directory / "cluster.yaml", directory / "nothing"
    file.write_text(yaml.safe_dump({"ingress": {"port": 0}, "block_hash_key_file": str(missing)}))
    return str(file), f"block_hash_key_file: {missing}: cannot be read"


def test_serve_says_it_before_it_starts_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(local_ray, "connect", lambda config: pytest.fail("Ray was started"))
    file, says = _without_file(tmp_path)
    result = CliRunner().invoke(app, ["serve", "--config", file])
    assert result.exit_code == 1
    assert says in result.output


def test_doctor_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file, says = _without_file(tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--config", file, "--json"])
    assert result.exit_code == 1
    [finding] = [one for one in json.loads(result.output) if one["check"] == "files"]
    assert finding["verdict"] == "failure"
    assert finding["found"].startswith(says)


@pytest.mark.parametrize("field", ["ca", "certificate", "key", "block_hash_key_file"])
def test_a_path_that_is_another_file_for_each_process_is_refused(field: str) -> None:
    settings: dict[str, object] = {"internal_tls": {"ca": "/ca", "certificate": "/crt", "key": "/key", field: "here"}}
    with pytest.raises(ValidationError, match="absolute path"):
        ClusterConfig.model_validate({field: "here"} if field == "block_hash_key_file" else settings)
