"""An ingress that gets ready for the models of its cluster."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from actors.core.requests.block_hash import PUBLIC_KEY
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.slo import Slo
from actors.model_facts import ModelFacts
from cluster.access.aims import SloConfig
from cluster.api.model_loader import ModelLoader
from cluster.api.process import IngressProcess
from cluster.client import GenerateClient
from cluster.config import DEMO_MODEL, ClusterConfig
from cluster.errors import TokenizerUnusable
from cluster.parameters.generation import GenerateRequest, TokenPrompt
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.routing.cost_router import CostRouter
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.cluster_membership import Membership, ServedModel
from cluster.settings.ingress import IngressConfig
from cluster.settings.routing import RoutingConfig, RoutingMode
from tests.cluster.serving_setup import FakeAdmin
from tests.cluster.tokenizer_kinds import tokenizer_of_kind
from tests.kv_transfer.connected_workers import LAYOUT
from tests.trusted import member

FACTS = ModelFacts(max_model_len=64, vocab_size=257, eos_token_ids=(256,), layout=LAYOUT)
FIRST = ServedModel(1, str(DEMO_MODEL), FACTS)


async def loaded(loader: ModelLoader, versions: ModelVersions, model: ServedModel) -> ModelVersion:
    await loader.load(model)
    version = versions.get(model.version)
    assert version is not None
    return version


async def test_a_model_is_loaded_once_and_its_facts_may_change() -> None:
    versions = ModelVersions()
    loader = ModelLoader(ClusterConfig(served_model_name="m"), versions, hash_key=PUBLIC_KEY)
    first = await loaded(loader, versions, FIRST)
    assert not loader.is_empty
    assert await loaded(loader, versions, FIRST) is first
    shorter = await loaded(loader, versions, replace(FIRST, facts=replace(FACTS, max_model_len=32)))
    assert (first.input_processor.model.max_model_len, shorter.input_processor.model.max_model_len) == (64, 32)
    assert shorter.input_processor.model.name == "m"
    assert shorter.input_processor.tokenizer is first.input_processor.tokenizer
    assert shorter.router is first.router, "it knows where prefixes are"


async def test_each_version_has_a_tokenizer_and_a_router_of_its_own(tmp_path: Path) -> None:
    versions = ModelVersions()
    loader = ModelLoader(ClusterConfig(), versions, hash_key=PUBLIC_KEY)
    other = shutil.copytree(DEMO_MODEL, tmp_path / "other")
    first = await loaded(loader, versions, FIRST)
    second = await loaded(loader, versions, ServedModel(2, str(other), FACTS))
    assert first.input_processor.tokenizer is not second.input_processor.tokenizer
    assert isinstance(first.router, CostRouter)
    assert isinstance(second.router, CostRouter)
    assert first.router is not second.router
    assert first.input_processor.model.name == second.input_processor.model.name == DEMO_MODEL.name


@pytest.mark.parametrize(("use_fastokens", "reason"), [(True, ""), (False, "fastokens is not asked for")])
async def test_what_encodes_prompts_is_configured(use_fastokens: bool, reason: str) -> None:
    versions = ModelVersions()
    loader = ModelLoader(
        ClusterConfig(ingress=IngressConfig(use_fastokens=use_fastokens)), versions, hash_key=PUBLIC_KEY
    )
    version = await loaded(loader, versions, FIRST)
    assert version.input_processor.tokenizer.why_not_fast == reason


async def test_a_tokenizer_that_fastokens_cannot_be_used_for_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of_kind("gemma"))  # type: ignore[no-untyped-call]  # transformers has no types here
    tokenizer.save_pretrained(tmp_path)
    await ModelLoader(ClusterConfig(), ModelVersions(), hash_key=PUBLIC_KEY).load(ServedModel(1, str(tmp_path), FACTS))
    [record] = [one for one in caplog.records if one.getMessage() == "prompts are encoded by Hugging Face's tokenizers"]
    assert "fastokens makes other tokens" in record.reason  # type: ignore[attr-defined]  # an extra


async def test_a_version_that_has_left_is_loaded_again_if_it_comes_back() -> None:
    versions = ModelVersions()
    loader = ModelLoader(ClusterConfig(), versions, hash_key=PUBLIC_KEY)
    await loaded(loader, versions, FIRST)
    await loaded(loader, versions, replace(FIRST, version=2))
    versions.keep({2})
    assert versions.get(1) is None
    assert (await loaded(loader, versions, FIRST)).version == 1


async def test_a_model_without_a_tokenizer_gets_no_requests_and_the_others_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    versions = ModelVersions()
    loader = ModelLoader(ClusterConfig(), versions, hash_key=PUBLIC_KEY)
    broken = ServedModel(2, str(tmp_path), FACTS)
    with pytest.raises(TokenizerUnusable):
        await loader.load(broken)
    await loader.load_all([broken, replace(FIRST, version=3)])
    assert (2 in versions, 3 in versions) == (False, True)
    assert "a model version cannot be loaded, so it gets no requests" in caplog.text
    assert set(loader.errors) == {2}
    await loader.load(replace(FIRST, version=2))
    assert loader.errors == {}


# -- the ingress as a whole ------------------------------------------------------------------------------------------


def make_process(model: Path = DEMO_MODEL) -> IngressProcess:
    ingress = IngressConfig(port=0)
    config = ClusterConfig(ingress=ingress)
    config = config.model_copy(update={"model": config.model.model_copy(update={"model": str(model)})})
    return IngressProcess(config, FakeAdmin(), member())


async def test_without_any_named_model_it_serves_the_configured_one() -> None:
    process = make_process()
    try:
        assert await process.start(FACTS)
    finally:
        await process.drain(0)


async def test_an_ingress_that_comes_late_needs_only_the_models_that_still_serve(tmp_path: Path) -> None:
    process = make_process(tmp_path / "deleted meanwhile")
    with pytest.raises(TokenizerUnusable):
        await process.start(FACTS)
    await process.update_membership(Membership(0, ()).with_model(replace(FIRST, version=2)))
    try:
        assert await process.start(FACTS)
    finally:
        await process.drain(0)


async def test_a_model_can_be_tried_before_any_engine_serves_it(tmp_path: Path) -> None:
    process = make_process()
    await process.prepare(FIRST)
    with pytest.raises(TokenizerUnusable, match="no tokenizer can be loaded"):
        await process.prepare(ServedModel(2, str(tmp_path), FACTS))
    await process.drain(0)


async def test_the_newest_model_is_described_and_an_older_snapshot_forgets_none() -> None:
    process = make_process()
    old = Membership(0, ()).with_model(FIRST)
    new = old.with_model(ServedModel(2, str(DEMO_MODEL), replace(FACTS, max_model_len=32)))
    await process.update_membership(new)
    await process.update_membership(old)
    assert process.membership_version == new.version
    try:
        port = (await process.start(FACTS)).grpc
        async with GenerateClient(f"127.0.0.1:{port}") as client:
            assert (await client.get_model()).max_model_len == 32
            await process.update_membership(new.with_model(replace(FIRST, version=3)))
            assert (await client.get_model()).max_model_len == 64
    finally:
        await process.drain(0)


@pytest.mark.parametrize(("setting", "temperature"), [("auto", 0.3), ("ignore", None)])
async def test_sampling_defaults_are_those_of_the_version_unless_they_are_ignored(
    setting: str, temperature: float | None, tmp_path: Path
) -> None:
    versions = ModelVersions()
    directory = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (directory / "generation_config.json").write_text('{"temperature": 0.3}')
    config = ClusterConfig.model_validate({"model": {"model": str(directory), "generation_config": setting}})
    version = await loaded(
        ModelLoader(config, versions, hash_key=PUBLIC_KEY), versions, ServedModel(1, str(directory), FACTS)
    )
    assert version.input_processor.model.defaults.temperature == temperature
    (directory / "generation_config.json").write_text("{")
    broken = ServedModel(2, str(directory), FACTS)
    if setting == "auto":
        with pytest.raises(TokenizerUnusable, match="is not JSON"):
            await ModelLoader(config, versions, hash_key=PUBLIC_KEY).load(broken)


async def test_the_aims_of_the_cluster_are_those_of_requests_without_any() -> None:
    versions = ModelVersions()
    config = ClusterConfig(slo=SloConfig(ttft_ms=500, itl_ms=50))
    version = await loaded(ModelLoader(config, versions, hash_key=PUBLIC_KEY), versions, FIRST)
    request = await version.input_processor.process(GenerateRequest(prompt=TokenPrompt([1, 2])))
    assert request.slo == Slo(ttft_s=0.5, itl_s=0.05)


@pytest.mark.parametrize("mode", RoutingMode)
async def test_requests_go_to_one_engine_where_the_mode_is_aggregate(mode: RoutingMode) -> None:
    versions = ModelVersions()
    config = ClusterConfig(routing=RoutingConfig(mode=mode))
    version = await loaded(ModelLoader(config, versions, hash_key=PUBLIC_KEY), versions, FIRST)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())
    route = version.router.choose(request, [_Load("p", EngineRole.PREFILL), _Load("d", EngineRole.DECODE)])
    assert (route.prefill is None) is (mode is RoutingMode.AGGREGATE)


class _Load:
    num_unfinished_requests = 0

    def __init__(self, engine_id: str, role: EngineRole) -> None:
        self.descriptor = EngineDescriptor(engine_id, 1, role, "host:1")
