"""The reference of all settings, and `raypd config`, which prints it and checks a file."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import ClusterConfig
from cluster.settings_reference import sections, to_markdown, to_yaml
from tools.write_settings_page import PAGE


def test_the_page_of_settings_says_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == to_markdown(), "run `make settings`"


def test_every_setting_has_a_description() -> None:
    assert [
        f"{section.paths[0]}.{name}"
        for section in sections()
        for name, field in section.model.model_fields.items()
        if not field.description
    ] == []


def test_links_of_the_page_lead_to_its_sections() -> None:
    page = to_markdown()
    anchors = {section.anchor for section in sections()}
    links = {part.partition(")")[0] for part in page.split("](#")[1:]}
    assert links
    assert links <= anchors


def test_the_default_file_is_the_default_cluster() -> None:
    printed = CliRunner().invoke(app, ["config", "--default"])
    assert printed.exit_code == 0
    assert ClusterConfig.model_validate(yaml.safe_load(printed.stdout)) == ClusterConfig()


def test_values_of_a_configuration_are_written_as_they_are() -> None:
    config = ClusterConfig.model_validate(
        {"served_model_name": "a: b", "ingress": {"tls": {"certificate": "/c.pem", "key": "/k.pem"}, "http": None}}
    )
    assert ClusterConfig.model_validate(yaml.safe_load(to_yaml(config))) == config


def test_the_schema_takes_what_is_valid_and_nothing_else() -> None:
    printed = CliRunner().invoke(app, ["config", "--schema"])
    schema = json.loads(printed.stdout)
    jsonschema.validate(yaml.safe_load(to_yaml()), schema)
    with pytest.raises(jsonschema.ValidationError, match="no_such_setting"):
        jsonschema.validate({"no_such_setting": 1}, schema)


def test_a_file_is_checked_without_starting_anything(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.yaml", tmp_path / "wrong.yaml"
    right.write_text("model: {model: /only/on/the/nodes}")
    wrong.write_text("ingress: {port: 70000}\ncache: {block_sizes: 3}")
    runner = CliRunner()
    assert runner.invoke(app, ["config", "--check", str(right)]).stdout == f"{right} is valid\n"
    refused = runner.invoke(app, ["config", "--check", str(wrong)])
    assert refused.exit_code == 2
    assert "ingress.port = 70000" in refused.stderr
    assert "cache.block_sizes: there is no such setting" in refused.stderr


@pytest.mark.parametrize("options", [[], ["--default", "--schema"]])
def test_config_wants_to_know_what_to_do(options: list[str]) -> None:
    refused = CliRunner().invoke(app, ["config", *options])
    assert refused.exit_code == 2
    assert "give one of --default, --schema and --check FILE" in " ".join(refused.stderr.replace("│", " ").split())
