"""Evicted prefixes come back from host memory and from the disk store of docs/kv_connector.md, and change no token.

Tests of kv_transfer/sides/storing_side.py, kv_transfer/stores/configured_stores.py.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.config import EngineConfig
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_builder import build_engine_core
from kv_transfer.config import KVTransferConfig, StoreConfig
from kv_transfer.errors import StoreUnavailable
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress
from tests.engine_pair import EnginePair, engine_config
from tests.reference import greedy_tokens, random_prompt
from tests.trusted import TRUST

pytestmark = pytest.mark.usefixtures("shared_models")

_NUM_TOKENS = 6
_GREEDY = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
_DOCUMENT = Path(__file__).parents[2] / "docs" / "kv_connector.md"
_CheckpointOf = Callable[[str], Path]


@pytest.fixture
def disk_store_package(tmp_path: Path) -> Iterator[None]:
    """The document's store, installed."""
    text = _DOCUMENT.read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    [entry_point] = re.findall(r'^```toml\n\[project.entry-points."(.*?)"\]\n(.*?)```$', text, re.MULTILINE | re.DOTALL)
    site = tmp_path / "site"
    metadata = site / "disk_store-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "disk_store.py").write_text(code)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: disk-store\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{entry_point[0]}]\n{entry_point[1].replace(chr(34), '')}")
    sys.path.insert(0, str(site))
    yield
    sys.path.remove(str(site))
    sys.modules.pop("disk_store", None)


def _prompts() -> list[tuple[int, ...]]:
    return [tuple(random_prompt(100, seed=seed)) for seed in range(4)]


def _serve_in_turns(directory: Path, pair: EnginePair, num_rounds: int) -> None:
    """Each prompt needs almost all of the prefill engine's blocks, so each of them evicts the one before."""
    for number in range(num_rounds):
        for index, prompt in enumerate(_prompts()):
            request_id = f"r{number}-{index}"
            pair.hand_over(request_id, prompt, _GREEDY)
            pair.run()
            assert pair.answers[request_id].token_ids == greedy_tokens(directory, prompt, _NUM_TOKENS)
    pair.assert_whole()


def _loaded_blocks(pair: EnginePair, engine: str) -> int:
    stats = pair.engines[engine].make_stats().store_stats
    assert stats is not None
    return stats.num_loaded_blocks


@pytest.mark.parametrize("overlap", [False, True])
def test_evicted_prefixes_come_back_from_host_memory(overlap: bool, checkpoint: _CheckpointOf) -> None:
    directory = checkpoint("llama")
    transfer = KVTransferConfig(transport="loopback", cpu_cache_gib=0.05)
    prefill = engine_config(directory, num_blocks=9, max_num_batched_tokens=64, overlap=overlap, transfer=transfer)
    with EnginePair(prefill, engine_config(directory, overlap=overlap)) as pair:
        _serve_in_turns(directory, pair, 2)
        assert _loaded_blocks(pair, "prefill") >= 4 * 5


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(family, marks=pytest.mark.more) for family in ("gemma4", "mimo", "deepseek_v3"))],
)
def test_a_second_engine_finds_what_the_first_one_left_on_disk(
    family: str, disk_store_package: None, tmp_path: Path, checkpoint: _CheckpointOf
) -> None:
    directory = checkpoint(family)
    stores = (StoreConfig(name="disk", options={"path": str(tmp_path / "kv")}),)
    transfer = KVTransferConfig(transport="loopback", cpu_cache_gib=0.05, stores=stores)
    prefill = engine_config(directory, num_blocks=9, max_num_batched_tokens=64, transfer=transfer)
    with EnginePair(prefill, engine_config(directory)) as pair:
        _serve_in_turns(directory, pair, 1)
    with EnginePair(prefill, engine_config(directory)) as pair:
        _serve_in_turns(directory, pair, 1)
        assert _loaded_blocks(pair, "prefill") >= 4 * 5
    for file in (tmp_path / "kv").rglob("*"):
        if file.is_file():
            file.write_bytes(b"too short")
    with EnginePair(prefill, engine_config(directory)) as pair:
        _serve_in_turns(directory, pair, 2)


def _start(config: EngineConfig) -> None:
    identity = EngineAddress("engine", 1, "engine")
    build_engine_core(config, identity, LoopbackHub().control(identity), threading.Event().set, trust=TRUST).shutdown()


def test_a_store_that_is_not_installed_is_refused_at_the_start(checkpoint: _CheckpointOf) -> None:
    transfer = KVTransferConfig(transport="loopback", stores=(StoreConfig(name="tape"),))
    with pytest.raises(StoreUnavailable, match=r"no installed package has a KV store 'tape'.*raypd\.kv_stores"):
        _start(engine_config(checkpoint("llama"), transfer=transfer))


def test_host_memory_too_small_for_a_block_is_refused_at_the_start(checkpoint: _CheckpointOf) -> None:
    transfer = KVTransferConfig(transport="loopback", cpu_cache_gib=1e-9)
    with pytest.raises(StoreUnavailable, match="is too small for one block"):
        _start(engine_config(checkpoint("llama"), transfer=transfer))
