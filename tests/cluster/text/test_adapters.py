"""The adapters that an ingress knows: those that are registered, and those that it finds.

Tests of actors/checkpoint/adapter_files.py, actors/lora_config.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from actors.checkpoint.adapter_files import describe_adapter
from actors.core.requests.adapter import Adapter
from actors.lora_config import LoraConfig
from cluster.access.caller import ANYBODY, Caller
from cluster.errors import AdapterNotFound, InvalidRequest
from cluster.text import adapters as adapters_module
from cluster.text.adapters import AdapterDirectory


def write_adapter(directory: Path, weights: bytes = b"weights", **settings: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]} | settings
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


async def test_an_adapter_is_found_below_an_allowed_directory(tmp_path: Path) -> None:
    write_adapter(tmp_path / "team" / "sql")
    adapters = AdapterDirectory(LoraConfig(allowed_directories=(str(tmp_path),)))
    found = await adapters.find("team/sql", ANYBODY)
    assert (found.name, found.directory) == ("team/sql", str(tmp_path / "team" / "sql"))
    assert adapters.known() == [found]
    assert adapters.knows("team/sql", ANYBODY)


async def test_other_weights_in_the_same_place_have_another_key(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "sql", b"old")
    adapters = AdapterDirectory(LoraConfig(allowed_directories=(str(tmp_path),)))
    old = await adapters.find("sql", ANYBODY)
    assert await adapters.find("sql", ANYBODY) is old
    write_adapter(directory, b"new")
    os.utime(directory / "adapter_model.safetensors", ns=(1, 1))
    new = await adapters.find("sql", ANYBODY)
    assert (new.name, new.key == old.key) == ("sql", False)


def test_the_order_of_lists_in_the_config_is_no_matter_of_the_digest(tmp_path: Path) -> None:
    limits = LoraConfig(allowed_directories=(str(tmp_path),))
    one = write_adapter(tmp_path / "one", target_modules=["q_proj", "v_proj"])
    other = write_adapter(tmp_path / "other", target_modules=["v_proj", "q_proj"])
    unlike = write_adapter(tmp_path / "unlike", target_modules=["v_proj", "q_proj"], lora_alpha=16)
    digests = [describe_adapter("x", str(directory), limits).digest for directory in (one, other, unlike)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("name", ["nothing", "../secret", "..", "/etc", "link", "a b", "x" * 200, ".hidden", "a//b"])
async def test_what_is_not_below_an_allowed_directory_is_not_there(name: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "secret")
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "secret")
    adapters = AdapterDirectory(LoraConfig(allowed_directories=(str(tmp_path / "allowed"),)))
    with pytest.raises((AdapterNotFound, InvalidRequest), match="lora_name is "):
        await adapters.find(name, ANYBODY)
    assert adapters.known() == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"r": 64}, "its rank is 64, and lora.max_lora_rank allows 16"), ({"use_dora": True}, "DoRA is not served")],
)
async def test_an_adapter_that_cannot_be_served_is_refused_with_the_reason(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "sql", **settings)
    adapters = AdapterDirectory(LoraConfig(allowed_directories=(str(tmp_path),)))
    with pytest.raises(InvalidRequest, match=reason):
        await adapters.find("sql", ANYBODY)


async def test_a_registered_adapter_keeps_its_weights_whatever_becomes_of_its_files(tmp_path: Path) -> None:
    adapters = AdapterDirectory(LoraConfig(allowed_directories=(str(tmp_path),)))
    registered = Adapter("sql", str(tmp_path / "sql"), "0123")
    adapters.register([registered])
    assert await adapters.find("sql", ANYBODY) == registered
    adapters.register([])
    with pytest.raises(
        AdapterNotFound, match="lora_name is 'sql'; allowed: one of the registered adapters: none so far"
    ):
        await adapters.find("sql", ANYBODY)


async def test_a_cluster_without_adapters_says_so() -> None:
    with pytest.raises(AdapterNotFound, match="serves no adapters"):
        await AdapterDirectory().find("sql", ANYBODY)


async def test_all_that_ask_at_once_wait_for_one_look_and_who_leaves_takes_it_from_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "sql")
    looks: list[str] = []

    def describe(name: str, directory: str, limits: LoraConfig) -> Adapter:
        looks.append(name)
        return describe_adapter(name, directory, limits)

    monkeypatch.setattr(adapters_module, "describe_adapter", describe)
    adapters = AdapterDirectory(LoraConfig(allowed_directories=(str(tmp_path),)))
    asking = [asyncio.create_task(adapters.find("sql", ANYBODY)) for _ in range(3)]
    await asyncio.sleep(0)
    asking[0].cancel()
    assert await asking[1] == await asking[2]
    assert looks == ["sql"]


async def test_an_adapter_that_may_not_be_used_is_as_one_that_is_not_there_and_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("french", "secret-project", "secret-plan"):
        write_adapter(tmp_path / name)
    adapters = AdapterDirectory(LoraConfig(allowed_directories=(str(tmp_path),)))
    alice = Caller("alice", "a", adapters=frozenset({"french", "german"}))
    await adapters.find("secret-project", ANYBODY)
    await adapters.find("french", alice)

    def describe(*arguments: object) -> Adapter:
        raise AssertionError("it was looked for")

    monkeypatch.setattr(adapters_module, "describe_adapter", describe)
    words = []
    for name in ("secret-project", "secret-plan", "nothing-at-all"):
        with pytest.raises(AdapterNotFound) as refused:
            await adapters.find(name, alice)
        words.append(str(refused.value).replace(name, "NAME"))
        assert not adapters.knows(name, alice)
    with pytest.raises(AdapterNotFound) as missing:
        await adapters.find("german", alice)
    words.append(str(missing.value).replace("german", "NAME"))
    assert set(words) == {"lora_name is 'NAME'; allowed: one of the registered adapters: french"}
    assert [adapter.name for adapter in adapters.known_to(alice)] == ["french"]
