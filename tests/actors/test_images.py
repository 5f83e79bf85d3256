"""Requests with images in engines: equal to transformers' generate(), whatever happens to their blocks.

Tests of actors/model/multimodal/families.py, actors/model/multimodal/image_batch.py,
actors/model/multimodal/positions.py, actors/model/multimodal/processing.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from actors.config import EngineConfig
from actors.core.outputs.engine_core_outputs import EndCause
from actors.core.requests.request import EngineCoreRequest, FinishReason
from actors.core.requests.sampling_params import SamplingParams
from actors.core.vllm_view import reset_encoder_cache
from actors.engine_builder import build_engine_core
from actors.engine_core import EngineCore
from actors.executor import InProcessExecutor
from actors.model.multimodal.image_batch import ImageBatch
from kv_transfer.links.loopback_control import LoopbackHub
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from tests.engine_pair import Answer, EnginePair, engine_config
from tests.trusted import TRUST
from tests.vision import VISION_FAMILIES, VisionReference, draw_image, image_marker, place_images

CheckpointOf = Callable[[str], Path]
NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Case:
    """Prompts with images of one family, and what transformers answers."""

    def __init__(self, directory: Path, family: str) -> None:
        self.directory = directory
        self.reference = VisionReference(directory, family)
        self._marker = image_marker(family)

    def request(self, request_id: str, seeds: Sequence[int], params: SamplingParams = GREEDY) -> EngineCoreRequest:
        """One image for each seed, text around them."""
        images = self._images(seeds)
        placed = place_images(self.directory, self._prompt(seeds), images)
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=placed.token_ids,
            sampling_params=params,
            mm_features=placed.features,
            encoder_inputs=placed.encoder_inputs,
        )

    @functools.cache  # noqa: B019  # as long-lived as the tests
    def expected(self, seeds: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> list[int]:
        return self.reference.greedy(self._prompt(seeds), self._images(seeds), num_tokens)

    def _prompt(self, seeds: Sequence[int]) -> list[int]:
        text = "".join(f" The engine {self._marker} reads" for _ in seeds)
        return self.reference.prompt(f"A serving{text} prompts", self._images(seeds))

    @staticmethod
    def _images(seeds: Sequence[int]) -> list[Image.Image]:
        return [draw_image(seed, 24 + 8 * (seed % 3), 40 - 8 * (seed % 2)) for seed in seeds]


class One:
    """One engine."""

    def __init__(self, config: EngineConfig) -> None:
        address = EngineAddress("engine-0", 1, "engine-0")
        self.core: EngineCore = build_engine_core(
            config, address, LoopbackHub().control(address), lambda: None, trust=TRUST
        )
        self.answers: dict[str, Answer] = {}

    def run(self, *requests: EngineCoreRequest) -> dict[str, list[int]]:
        """Submit, and step until all have ended."""
        self.answers = {request.request_id: Answer() for request in requests}
        for request in requests:
            self.core.submit(request)
        while not all(answer.is_finished for answer in self.answers.values()):
            for batch in self.core.step().outputs.values():
                for output in batch.outputs:
                    self.answers[output.request_id].take("engine-0", output)
            self.core.scheduler.check_integrity()
        return {request_id: answer.token_ids for request_id, answer in self.answers.items()}

    @property
    def images(self) -> ImageBatch:
        return images_of(self.core)


def images_of(core: EngineCore) -> ImageBatch:
    assert isinstance(core.executor, InProcessExecutor)
    images = core.executor._worker.runner._images
    assert images is not None
    return images


@pytest.fixture
def case(checkpoint: CheckpointOf) -> Case:
    return Case(checkpoint("qwen2_5_vl"), "qwen2_5_vl")


@pytest.mark.parametrize(("family", "budget"), [*((family, 5) for family in VISION_FAMILIES), ("llava", 64)])
def test_tokens_equal_generate_wherever_chunks_end(family: str, budget: int, checkpoint: CheckpointOf) -> None:
    case = Case(checkpoint(family), family)
    engine = One(engine_config(case.directory, block_size=8, max_num_seqs=4, max_num_batched_tokens=budget))
    asked = {"one": (1,), "two": (2, 3), "text": (), "the same twice": (1, 1)}
    answers = engine.run(*(case.request(name, seeds) for name, seeds in asked.items()))
    assert answers == {name: case.expected(seeds) for name, seeds in asked.items()}
    engine.core.shutdown()


def test_an_image_is_encoded_once_for_all_who_show_it(case: Case) -> None:
    config = engine_config(case.directory, block_size=8)
    engine = One(config.model_copy(update={"cache": config.cache.model_copy(update={"enable_prefix_caching": False})}))
    for name in ("a", "b"):
        answers = engine.run(case.request(f"{name}1", (1,)), case.request(f"{name}2", (1, 2)))
        assert answers == {f"{name}1": case.expected((1,)), f"{name}2": case.expected((1, 2))}
    assert engine.images.num_encoded == 2
    assert reset_encoder_cache(engine.core.scheduler)
    assert engine.run(case.request("c", (1,)))["c"] == case.expected((1,))
    assert engine.images.num_encoded == 3
    engine.core.shutdown()


def test_the_prefix_cache_tells_images_apart(case: Case) -> None:
    """Both prompts have the same tokens."""
    engine = One(engine_config(case.directory, block_size=8))
    seeds = ((1,), (7,), (1,))
    for number, (seed,) in enumerate(seeds):
        request_id = str(number)
        assert engine.run(case.request(request_id, (seed,)))[request_id] == case.expected((seed,))
        timings = engine.answers[request_id].timings("engine-0")
        num_before_image = case.request("x", (seed,)).mm_features[0].offset // 8 * 8
        assert timings.num_cached_tokens == (0, num_before_image)[number > 0] or number == 2
    assert timings.num_cached_tokens == (len(case.request("x", (1,)).prompt_token_ids) - 1) // 8 * 8
    assert engine.images.num_encoded == 2, "what is cached needs no encoder"
    engine.core.shutdown()


def test_a_small_encoder_budget_and_cache_only_take_longer(case: Case) -> None:
    num_embeds = max(feature.num_embeds for feature in case.request("x", (1, 2, 3)).mm_features)
    config = engine_config(case.directory, block_size=8)
    scheduler = config.scheduler.model_copy(
        update={"max_num_encoder_input_tokens": num_embeds, "encoder_cache_size": num_embeds}
    )
    engine = One(config.model_copy(update={"scheduler": scheduler}))
    asked = {"a": (1, 2, 3), "b": (2, 1), "c": (3,)}
    answers = engine.run(*(case.request(name, seeds) for name, seeds in asked.items()))
    assert answers == {name: case.expected(seeds) for name, seeds in asked.items()}
    engine.core.shutdown()


def test_an_image_that_no_step_can_hold_is_refused(case: Case) -> None:
    config = engine_config(case.directory)
    scheduler = config.scheduler.model_copy(update={"encoder_cache_size": 3})
    engine = One(config.model_copy(update={"scheduler": scheduler}))
    engine.run(case.request("a", (1,)))
    error = engine.answers["a"].last["engine-0"].error
    assert error is not None
    assert "encoder_cache_size = 3" in error
    engine.core.shutdown()


def test_preempted_requests_start_over_from_their_images(case: Case) -> None:
    engine = One(engine_config(case.directory, block_size=4, num_blocks=38, max_num_batched_tokens=64))
    params = replace(GREEDY, max_tokens=24)
    asked = {str(number): (number, number + 1) for number in range(4)}
    answers = engine.run(*(case.request(name, seeds, params) for name, seeds in asked.items()))
    assert answers == {name: case.expected(seeds, 24) for name, seeds in asked.items()}
    assert engine.core.make_stats().num_preemptions > 0
    engine.core.shutdown()


def hand_over(pair: EnginePair, request: EngineCoreRequest) -> None:
    """Submit to both engines; what to encode goes to the producer alone."""
    pair.answers[request.request_id] = Answer()
    for name, role, peer in (
        ("decode", TransferRole.CONSUMER, "prefill"),
        ("prefill", TransferRole.PRODUCER, "decode"),
    ):
        ticket = KVTransferParams(f"transfer-{request.request_id}", 0, role, pair.addresses[peer])
        inputs = request.encoder_inputs if role is TransferRole.PRODUCER else ()
        pair.engines[name].submit(replace(request, kv_transfer_params=ticket, encoder_inputs=inputs))


def test_the_consumer_needs_nothing_of_an_image_but_its_kv(case: Case) -> None:
    config = engine_config(case.directory, block_size=8, max_num_batched_tokens=24, max_num_seqs=8)
    with EnginePair(config, config) as pair:
        asked = {str(number): (number, number + 1) for number in range(3)}
        for name, seeds in asked.items():
            hand_over(pair, case.request(name, seeds))
        pair.run()
        assert {name: pair.answers[name].token_ids for name in asked} == {
            name: case.expected(seeds) for name, seeds in asked.items()
        }
        assert images_of(pair.engines["decode"]).num_encoded == 0
        pair.assert_whole()


def test_a_consumer_that_lost_an_images_kv_gives_the_request_back(case: Case) -> None:
    config = engine_config(case.directory, block_size=8)
    with EnginePair(config, config) as pair:
        hand_over(pair, case.request("r", (1,)))
        pair.run(lambda: len(pair.answers["r"].token_ids) >= 3)
        pair.engines["decode"].scheduler.reset_prefix_cache(reset_running_requests=True)
        pair.run()
        last = pair.answers["r"].last["decode"]
        assert (last.finish_reason, last.end_cause) == (FinishReason.ERROR, EndCause.INPUTS_MISSING)
        num_given = len(pair.answers["r"].token_ids)
        assert pair.answers["r"].token_ids == case.expected((1,))[:num_given]
        pair.assert_whole()
        # Whoever submits it anew with everything gets the rest.
        pair.answers.clear()
        request = case.request("s", (1,))
        hand_over(pair, replace(request, output_token_ids=case.expected((1,))[:num_given]))
        pair.answers["s"].token_ids = case.expected((1,))[:num_given]
        pair.run()
        assert pair.answers["s"].token_ids == case.expected((1,))
        pair.assert_whole()
