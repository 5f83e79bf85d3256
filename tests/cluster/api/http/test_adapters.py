"""Over HTTP an adapter is a model of its name, for whoever may use it; for others it is not there."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import yaml

from actors.lora_config import LoraConfig
from cluster.access.access_control import AccessControl
from cluster.access.tokens import Tokens, hash_token
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.routing.least_loaded import LeastLoadedPair
from cluster.text.adapters import AdapterDirectory
from cluster.text.input_processor import InputProcessor
from cluster.text.model_tokenizer import ModelTokenizer
from tests.cluster.api.http.http_setup import http_server, template
from tests.cluster.serving_setup import MODEL, make_pair, make_serving
from tests.cluster.text.test_adapters import write_adapter
from tests.fakes import byte_tokenizer

_COUNT = "raypd_request_duration_seconds_count{"
_CALLS = (
    ("GET", "/v1/models/{}", None),
    ("POST", "/v1/completions", {"prompt": "hello"}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ("POST", "/v1/embeddings", {"input": "hello"}),
    ("POST", "/tokenize", {"prompt": "hello"}),
    ("POST", "/detokenize", {"tokens": [65]}),
)


@asynccontextmanager
async def _clients(directory: Path) -> AsyncIterator[tuple[httpx2.AsyncClient, httpx2.AsyncClient]]:
    """Ann's, who may use `french` alone, and Bob's, who may use any."""
    for name in ("french", "bobs-project"):
        write_adapter(directory / "adapters" / name)
    entries = [
        {"name": "ann", "sha256": hash_token("ann's"), "adapters": ["french"]},
        {"name": "bob", "sha256": hash_token("bob's")},
    ]
    (directory / "tokens.yaml").write_text(yaml.safe_dump({"tokens": entries}))
    adapters = AdapterDirectory(LoraConfig(allowed_directories=(str(directory / "adapters"),)))
    processor = InputProcessor(MODEL, ModelTokenizer(byte_tokenizer(), template, use_fastokens=True), adapters=adapters)
    pair = make_pair()
    versions = ModelVersions(ModelVersion(1, processor, LeastLoadedPair()))
    serving = make_serving(pair.prefill, pair.decode, versions=versions)
    access = AccessControl(Tokens(directory / "tokens.yaml"))
    async with http_server(serving, access=access) as (_, port):

        def client(token: str) -> httpx2.AsyncClient:
            headers = {"authorization": f"Bearer {token}"}
            return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, headers=headers)

        async with client("ann's") as ann, client("bob's") as bob:
            yield ann, bob


async def _listed(client: httpx2.AsyncClient) -> list[str]:
    return [model["id"] for model in (await client.get("/v1/models")).json()["data"]]


async def test_a_token_sees_only_the_adapters_that_it_may_use(tmp_path: Path) -> None:
    async with _clients(tmp_path) as (ann, bob):
        for name in ("french", "bobs-project"):
            assert (await bob.get(f"/v1/models/{name}")).json()["parent"] == "tiny"
        assert await _listed(bob) == ["tiny", "bobs-project", "french"]
        assert await _listed(ann) == ["tiny", "french"]
        assert (await ann.get("/v1/models/french")).status_code == 200


async def test_metrics_name_only_adapters_that_the_reader_may_use(tmp_path: Path) -> None:
    async with _clients(tmp_path) as (ann, bob):
        for name in ("bobs-project", "french"):
            # No engine answers in time.
            await bob.post("/v1/completions", json={"model": name, "prompt": "hello", "timeout": 0.02})
        texts = [(await client.get("/metrics")).text for client in (ann, bob)]
        ended = [
            {re.sub(r".*model=\"(.*?)\".*", r"\1", line) for line in text.splitlines() if _COUNT in line}
            for text in texts
        ]
        assert ended == [{"tiny", "french", "other"}, {"tiny", "french", "bobs-project"}]
        assert "bobs-project" not in texts[0]


async def test_an_adapter_that_may_not_be_used_is_answered_as_one_that_is_not_there(tmp_path: Path) -> None:
    async with _clients(tmp_path) as (ann, bob):
        for is_known in (False, True):
            if is_known:
                await bob.get("/v1/models/bobs-project")
            for method, path, body in _CALLS:
                answers = []
                for name in ("bobs-project", "none-at-all"):
                    sent = None if body is None else body | {"model": name}
                    answer = await ann.request(method, path.format(name), json=sent)
                    answers.append((answer.status_code, answer.text.replace(name, "NAME")))
                assert answers[0] == answers[1], path
                assert answers[0][0] == 404, (path, answers)
                assert "french" not in answers[0][1]
                assert "bobs-project" not in answers[1][1]
