"""A checkpoint is judged by its headers: what is not whole is found, and nothing of it is loaded.

Tests of cluster/checks/checkpoint_files.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.checks.checkpoint_files import INDEX_FILE
from cluster.commands.doctor.checkpoint import check_tokenizer, read_checkpoint
from cluster.commands.doctor.findings import Verdict
from cluster.config import DEMO_MODEL


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, directory)
    return directory


def test_a_whole_checkpoint_says_what_it_is() -> None:
    checkpoint, [finding] = read_checkpoint(DEMO_MODEL)

    assert checkpoint is not None
    assert finding.verdict is Verdict.OK
    assert (checkpoint.num_heads, checkpoint.num_kv_heads, checkpoint.head_dim, checkpoint.num_layers) == (4, 2, 64, 5)
    assert (checkpoint.dtype("auto"), checkpoint.dtype("float32"), checkpoint.max_model_len) == (
        "bfloat16",
        "float32",
        2048,
    )


def _cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _break_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'{"', b"{{", 1))


def _name_another_file(directory: Path) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}))


_SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (_cut, "by its header it should have"),
    "broken header": (_break_header, "has a broken header"),
    "not safetensors": (
        lambda d: (d / "model.safetensors").write_text("<html>not found</html>"),
        "is not a safetensors",
    ),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), "is not a safetensors file"),
    "a shard missing": (_name_another_file, "names files that are not there: more.safetensors"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no *.safetensors"),
    "no config": (lambda d: (d / "config.json").unlink(), "there is no config.json"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "must be a JSON object, not a list"),
    "text_config is a text": (
        lambda d: (d / "config.json").write_text('{"text_config": "x"}'),
        "text_config must be an object, not a string",
    ),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "is not JSON: Expecting property name"),
}


@pytest.mark.parametrize("how", _SPOILT)
def test_a_checkpoint_that_is_not_whole_is_found(how: str, copy: Path) -> None:
    spoil, expected = _SPOILT[how]
    spoil(copy)

    checkpoint, [finding] = read_checkpoint(copy)

    assert checkpoint is None
    assert finding.verdict is Verdict.FAILURE
    assert expected in finding.found
    assert finding.advice


def test_a_tokenizer_is_tried(copy: Path) -> None:
    finding = check_tokenizer(copy, use_fastokens=True)
    assert finding.verdict is Verdict.OK
    assert "prompts are encoded by fastokens" in finding.found
    finding = check_tokenizer(copy, use_fastokens=False)
    assert "prompts are encoded by Hugging Face's tokenizers (fastokens is not asked for)" in finding.found
    settings = copy / "tokenizer_config.json"
    without = {name: value for name, value in json.loads(settings.read_text()).items() if name != "chat_template"}
    settings.write_text(json.dumps(without))
    assert check_tokenizer(copy, use_fastokens=True).verdict is Verdict.WARNING
    (copy / "tokenizer.json").unlink()
    assert check_tokenizer(copy, use_fastokens=True).verdict is Verdict.FAILURE
