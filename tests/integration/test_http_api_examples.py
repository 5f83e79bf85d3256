"""The example of docs/api.md's HTTP half runs as it is, but for the address and the name."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL
from kv_transfer.config import KVTransferConfig
from tests.cluster.api.http.http_setup import http_server
from tests.engine_pair import engine_config
from tests.integration.local_cluster import local_cluster

_PAGE = Path(__file__).parents[2] / "docs" / "api.md"


async def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    half = _PAGE.read_text(encoding="utf-8").partition("\n## HTTP")[2]
    [example] = re.findall(r"^```python\n(.*?)^```$", half, re.MULTILINE | re.DOTALL)
    config = engine_config(DEMO_MODEL, transfer=KVTransferConfig(transport="tcp"))
    async with local_cluster(config) as cluster, http_server(cluster.serving) as (_, port), asyncio.timeout(60):
        assert "127.0.0.1:8000" in example
        code = example.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace('"demo_model"', '"test"')
        await asyncio.to_thread(exec, compile(code, str(_PAGE), "exec"), {})
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == ""
    assert last.endswith("16")
