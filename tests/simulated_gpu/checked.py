"""Tests that run on the simulated GPU; test_simulated_gpu.py starts them with its plugin, in a process of their own."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.config import ModelConfig
from actors.core.requests.sampling_params import SamplingParams
from actors.lora_config import LoraConfig
from actors.model.graphs.recorder import DeviceGraphRecorder
from actors.model.model_runner import ModelRunner
from actors.model.uploads import upload
from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.connector.steps import KVConnectorMetadata, StagedBytes
from kv_transfer.connector.store_steps import BlockLoad, LoadedBlocks, StoredBlock, StoreMetadata
from kv_transfer.device_kind import device_module, mark_stream, pin_for
from kv_transfer.sides.staged_bytes import StagingSide
from kv_transfer.stores.host_tier import HostMemoryWorker
from kv_transfer.stores.store_copier import StoreCopier
from tests.actors.model.stepping import Sequence, Stepper, make_runner
from tests.actors.speculation import EAGER, SpeculatingEngine
from tests.adapters import adapted_tokens, adapter_of, make_adapter
from tests.engine_pair import EnginePair, engine_config
from tests.kv_transfer.connected_workers import LAYOUT
from tests.reference import greedy_tokens, random_prompt
from tests.simulated_gpu.block_order import Unordered
from tests.simulated_gpu.device import install
from tests.simulated_gpu.graph import FreedMemory
from tests.simulated_gpu.tensors import SIMULATION, ChangedTooEarly, MixedDevices, WaitsInGraph

CheckpointOf = Callable[[str], Path]
DEVICE = install()
DENSE_FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2", "opt"),
    *("granite_swa", "nemotron", "stablelm", "falcon", "falcon_40b", "falcon_mha"),
)
GROUPED_FAMILIES = ("gemma3n", "gemma4", "llama4")
"""Their layers differ in their KV, read other layers' KV, or attend within chunks."""
LATENT_FAMILIES = ("minicpm3", "youtu")
"""Their layers cache latents: the torch backend serves them, without graphs."""
MIXTURES = ("mixtral", "qwen3_moe")
PROMPT_LENGTHS = (1, 7, 16, 33, 40)
NUM_OUTPUT_TOKENS = 12

WAITS_OF_A_STEP = {"actors/model/sampling/transfers.py:wait": 1}
"""A step waits once, for what the sampler has computed. By function, how often."""


@pytest.fixture(autouse=True)
def _no_waits() -> None:
    SIMULATION.take_waits()


class TestDevice:
    """The device notices what a GPU would."""

    def test_it_computes(self) -> None:
        numbers = torch.arange(6, device=DEVICE).view(2, 3)
        assert (numbers * 2).sum(dim=1).cpu().tolist() == [6, 24]

    def test_a_mix_of_devices_raises(self) -> None:
        on_device = torch.zeros(3, device=DEVICE)
        with pytest.raises(MixedDevices, match=r"host tensors of shapes \[\(3,\)\]"):
            on_device + torch.ones(3)
        with pytest.raises(MixedDevices):
            on_device[torch.tensor([0, 1])]
        assert (on_device + torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0], "a number of the host is no tensor"

    @pytest.mark.parametrize(
        "read",
        [
            lambda tensor: tensor[0].item(),
            lambda tensor: bool(tensor.any()),
            lambda tensor: tensor.tolist(),
            lambda tensor: tensor.cpu(),
            lambda tensor: tensor.nonzero(),
            lambda tensor: tensor[tensor > 0],
            lambda tensor: tensor.repeat_interleave(tensor),
            lambda tensor: tensor.copy_(torch.ones(3, dtype=torch.int64)),
            lambda tensor: tensor.copy_(torch.ones(3, dtype=torch.int64), non_blocking=True),
            lambda tensor: torch.tensor([1, 2], device=DEVICE),
        ],
    )
    def test_a_wait_is_counted_and_raises_while_a_graph_records(self, read: Callable[[torch.Tensor], object]) -> None:
        tensor = torch.arange(3, device=DEVICE)
        read(tensor)
        assert SIMULATION.take_waits() == {"outside": 1}
        with pytest.raises(WaitsInGraph):
            DeviceGraphRecorder(DEVICE).record(lambda: read(tensor))

    def test_what_is_repeated_a_number_of_times_that_the_host_knows_does_not_wait(self) -> None:
        tensor = torch.arange(3, device=DEVICE)
        with torch.inference_mode():
            repeated = [tensor.repeat_interleave(2), tensor.repeat_interleave(tensor, output_size=3)]
        assert SIMULATION.take_waits() == {}
        assert [one.tolist() for one in repeated] == [[0, 0, 1, 1, 2, 2], [1, 2, 2]]

    def test_an_upload_does_not_wait(self) -> None:
        arrays = [np.arange(5), np.arange(6).reshape(2, 3)]
        uploaded = upload(arrays, DEVICE)
        assert SIMULATION.take_waits() == {}
        assert [tensor.tolist() for tensor in uploaded] == [array.tolist() for array in arrays]
        assert all(tensor.storage_offset() % 2 == 0 for tensor in uploaded), "each begins at 16 bytes"

    def test_memory_of_a_queued_upload_must_not_change(self) -> None:
        pinned = pin_for(DEVICE, torch.arange(3))
        pinned.to(DEVICE, non_blocking=True)
        pinned[0] = 7
        with pytest.raises(ChangedTooEarly):
            torch.zeros(1, device=DEVICE).item()

    def test_a_queued_download_arrives_at_its_event(self) -> None:
        target = pin_for(DEVICE, torch.zeros(3, dtype=torch.int64))
        target.copy_(torch.arange(3, device=DEVICE) + 4, non_blocking=True)
        event = mark_stream(DEVICE)
        assert event is not None
        assert target.tolist() == [1, 1, 1], "it holds anything before"
        assert not event.query()
        event.synchronize()
        assert target.tolist() == [4, 5, 6]
        assert event.query()

    def test_work_on_a_side_stream_waits_for_what_has_written_its_memory(self) -> None:
        module, tensor = device_module(DEVICE), torch.zeros(3, device=DEVICE)
        side = module.Stream(DEVICE)
        with module.stream(side), pytest.raises(Unordered):
            tensor + 1
        event = mark_stream(DEVICE)
        assert event is not None
        with module.stream(side):
            side.wait_event(event)
            added = tensor + 1
        assert added.tolist() == [1.0, 1.0, 1.0]


class TestGraph:
    """A graph replays on the memory that it was recorded with."""

    def test_it_reads_what_lies_in_its_inputs_now(self) -> None:
        inputs, outputs = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
        graph = DeviceGraphRecorder(DEVICE).record(lambda: outputs.copy_(inputs * 2 + 1))
        inputs.fill_(5)
        graph.replay()
        assert outputs.tolist() == [11.0, 11.0, 11.0]

    def test_a_number_of_the_host_stays_what_it_was(self) -> None:
        numbers, outputs = [1.0], torch.zeros(2, device=DEVICE)
        graph = DeviceGraphRecorder(DEVICE).record(lambda: outputs.fill_(numbers[0]))
        numbers[0] = 2.0
        graph.replay()
        assert outputs.tolist() == [1.0, 1.0]

    def test_memory_that_is_freed_raises(self) -> None:
        outputs = torch.zeros(2, device=DEVICE)
        temporary = [torch.ones(2, device=DEVICE)]
        graph = DeviceGraphRecorder(DEVICE).record(lambda: outputs.copy_(temporary[0]))
        temporary.clear()
        with pytest.raises(FreedMemory):
            graph.replay()

    def test_another_graph_of_the_pool_overwrites_results(self) -> None:
        inputs, results = torch.ones(2, device=DEVICE), []
        recorder = DeviceGraphRecorder(DEVICE)
        first = recorder.record(lambda: results.append(inputs + 1))
        second = recorder.record(lambda: results.append(inputs + 2))
        first.replay()
        assert results[0].tolist() == [2.0, 2.0]
        second.replay()
        assert np.isnan(results[0].tolist()).all()

    def test_free_memory_is_asked_of_the_device(self) -> None:
        assert DeviceGraphRecorder(DEVICE).free_memory_bytes() == device_module(DEVICE).mem_get_info(DEVICE)[0]


def run(runner: ModelRunner) -> dict[str, list[int]]:
    """Chunks of prompts beside decodes, then decodes alone."""
    stepper = Stepper(runner)
    for length in PROMPT_LENGTHS:
        stepper.add(str(length), Sequence(random_prompt(length)))
    outputs = stepper.run(num_output_tokens=NUM_OUTPUT_TOKENS, chunk=17)
    num_steps = len(stepper.outputs)
    assert SIMULATION.take_waits() == {place: count * num_steps for place, count in WAITS_OF_A_STEP.items()}
    return outputs


class TestFamilies:
    """Whole steps of each dense family."""

    @pytest.mark.parametrize("family", [*DENSE_FAMILIES, *GROUPED_FAMILIES])
    def test_tokens_equal_generate_with_graphs_and_without(self, family: str, checkpoint: CheckpointOf) -> None:
        directory = checkpoint(family)
        expected = {
            str(length): greedy_tokens(directory, tuple(random_prompt(length)), NUM_OUTPUT_TOKENS)
            for length in PROMPT_LENGTHS
        }
        runner = make_runner(directory)
        runner.warm_up()
        before = runner.kv_cache.cpu()
        config = ModelConfig(model=str(directory), cuda_graph_sizes=(2, 6))
        said: list[str] = []
        SIMULATION.take_waits()
        runner.capture_graphs(config, 16, said.append)
        assert said == [f"capturing CUDA graphs, {index} of 2 batch sizes" for index in (1, 2)]
        assert torch.equal(runner.kv_cache.cpu(), before), "capturing writes nothing into the cache"
        SIMULATION.take_waits()

        assert run(runner) == expected
        assert runner._graphs is not None
        assert runner._graphs.num_replays == NUM_OUTPUT_TOKENS - 1, "prompts are computed eagerly, decodes replayed"
        assert re.fullmatch(r"for 2, 6 requests, \d+ MiB, \d+\.\d s; all sizes are captured", runner.cuda_graphs)

        eager = make_runner(directory)
        eager.capture_graphs(config.model_copy(update={"enforce_eager": True}), 16, said.append)
        assert len(said) == 2
        assert eager.cuda_graphs == "none: model.enforce_eager is set"
        SIMULATION.take_waits()
        assert run(eager) == expected

    @pytest.mark.parametrize("family", LATENT_FAMILIES)
    def test_families_that_the_kernels_do_not_serve_wait_for_their_tokens_only(
        self, family: str, checkpoint: CheckpointOf
    ) -> None:
        directory = checkpoint(family)
        runner = make_runner(directory)
        runner.warm_up()
        runner.capture_graphs(ModelConfig(model=str(directory), cuda_graph_sizes=(2,)), 16, lambda text: None)
        assert runner.cuda_graphs == "none: the attention backend cannot be captured"
        SIMULATION.take_waits()
        assert run(runner) == {
            str(length): greedy_tokens(directory, tuple(random_prompt(length)), NUM_OUTPUT_TOKENS)
            for length in PROMPT_LENGTHS
        }


class TestExperts:
    """Mixtures of experts: torch multiplies the rows of all experts at once, in bfloat16 without a wait."""

    @pytest.mark.parametrize("family", [*MIXTURES, "mimo", "gpt_oss", "granitemoe_swa"])
    def test_tokens_equal_generate_in_float32_though_every_layer_waits(
        self, family: str, checkpoint: CheckpointOf
    ) -> None:
        directory = checkpoint(family)
        runner = make_runner(directory)
        runner.warm_up()
        runner.capture_graphs(ModelConfig(model=str(directory), cuda_graph_sizes=(6,)), 16, lambda text: None)
        assert "in float32 on compute capability 9.0" in runner.cuda_graphs
        stepper = Stepper(runner)
        for length in PROMPT_LENGTHS:
            stepper.add(str(length), Sequence(random_prompt(length)))
        SIMULATION.take_waits()
        outputs = stepper.run(num_output_tokens=NUM_OUTPUT_TOKENS, chunk=17)
        waits = SIMULATION.take_waits()
        num_layers = runner._model.geometry.num_layers
        num_steps = len(stepper.outputs)
        assert sorted(waits.values()) == [num_steps, 2 * num_layers * num_steps]
        for length in PROMPT_LENGTHS:
            expected = greedy_tokens(directory, tuple(random_prompt(length)), NUM_OUTPUT_TOKENS)
            assert outputs[str(length)] == expected

    @pytest.mark.parametrize("family", MIXTURES)
    def test_in_bfloat16_graphs_give_the_tokens_of_eager_steps(self, family: str, checkpoint: CheckpointOf) -> None:
        directory = checkpoint(family)
        outputs = []
        for enforce_eager in (True, False):
            runner = make_runner(directory, dtype="bfloat16")
            runner.warm_up()
            config = ModelConfig(model=str(directory), cuda_graph_sizes=(2, 6), enforce_eager=enforce_eager)
            runner.capture_graphs(config, 16, lambda text: None)
            SIMULATION.take_waits()
            outputs.append(run(runner))
            assert (runner._graphs is None) == enforce_eager, runner.cuda_graphs
        assert runner._graphs is not None
        assert runner._graphs.num_replays == NUM_OUTPUT_TOKENS - 1
        assert outputs[0] == outputs[1]


class TestAhead:
    """Each step is launched before the tokens of the step before it have come."""

    @staticmethod
    def run_ahead(stepper: Stepper, num_output_tokens: int, chunk: int = 1 << 30) -> None:
        """Step as Stepper.run() does, one step ahead of the tokens."""
        wait = None
        while unfinished := {
            req_id: min(chunk, sequence.num_tokens - sequence.num_computed)
            for req_id, sequence in stepper.sequences.items()
            if len(sequence.output) < num_output_tokens
        }:
            launched = stepper.launch(unfinished)
            if wait is not None:
                wait()
            wait = launched
        assert wait is not None
        wait()

    @pytest.mark.parametrize("has_graphs", [False, True])
    def test_tokens_equal_generate_and_launching_waits_for_nothing(
        self, has_graphs: bool, checkpoint: CheckpointOf
    ) -> None:
        directory = checkpoint("llama")
        runner = make_runner(directory)
        if has_graphs:
            runner.warm_up()
            config = ModelConfig(model=str(directory), cuda_graph_sizes=(2, 6))
            runner.capture_graphs(config, 16, lambda text: None)
        stepper = Stepper(runner)
        for length in PROMPT_LENGTHS:
            stepper.add(str(length), Sequence(random_prompt(length)))
        SIMULATION.take_waits()
        first = stepper.launch({str(length): length for length in PROMPT_LENGTHS})
        second = stepper.launch({str(length): 1 for length in PROMPT_LENGTHS})
        assert SIMULATION.take_waits() == {}
        first()
        third = stepper.launch({str(length): 1 for length in PROMPT_LENGTHS})
        second()
        third()
        assert SIMULATION.take_waits() == {place: 3 * count for place, count in WAITS_OF_A_STEP.items()}
        self.run_ahead(stepper, NUM_OUTPUT_TOKENS)
        for length in PROMPT_LENGTHS:
            expected = greedy_tokens(directory, tuple(random_prompt(length)), NUM_OUTPUT_TOKENS)
            assert stepper.sequences[str(length)].output == expected
        if has_graphs:
            assert runner._graphs is not None
            assert runner._graphs.num_replays == NUM_OUTPUT_TOKENS - 1

    def test_chunks_run_ahead_too_and_their_steps_end_when_they_are_computed(self, checkpoint: CheckpointOf) -> None:
        directory = checkpoint("llama")
        stepper = Stepper(make_runner(directory))
        stepper.add("a", Sequence(random_prompt(40)))
        SIMULATION.take_waits()
        chunk = stepper.launch({"a": 17})
        assert SIMULATION.take_waits() == {}
        chunk()
        assert SIMULATION.take_waits() == {"actors/model/launched_step.py:result": 1}
        self.run_ahead(stepper, NUM_OUTPUT_TOKENS, chunk=17)
        assert stepper.sequences["a"].output == greedy_tokens(directory, tuple(random_prompt(40)), NUM_OUTPUT_TOKENS)

    def test_a_token_that_comes_late_is_not_given_to_the_next_request_of_the_row(
        self, checkpoint: CheckpointOf
    ) -> None:
        directory = checkpoint("llama")
        stepper = Stepper(make_runner(directory))
        stepper.add("gone", Sequence(random_prompt(9)))
        late = stepper.launch({"gone": 9})
        row = stepper.sequences["gone"].row
        stepper.finish("gone")
        stepper.add("next", Sequence(random_prompt(9 + 7)))
        launched = stepper.launch({"next": 5})
        assert stepper.sequences["next"].row == row
        late()
        launched()
        self.run_ahead(stepper, NUM_OUTPUT_TOKENS)
        assert stepper.sequences["next"].output == greedy_tokens(directory, tuple(random_prompt(16)), NUM_OUTPUT_TOKENS)

    def test_a_preempted_request_keeps_its_late_token(self, checkpoint: CheckpointOf) -> None:
        directory = checkpoint("llama")
        stepper = Stepper(make_runner(directory))
        for name in "ab":
            stepper.add(name, Sequence(random_prompt(20 + ord(name) % 2)))
        both = stepper.launch({name: len(stepper.sequences[name].prompt) for name in "ab"})
        stepper.preempt("a")
        one = stepper.launch({"b": 1})
        both()
        one()
        self.run_ahead(stepper, NUM_OUTPUT_TOKENS)
        for sequence in stepper.sequences.values():
            assert sequence.output == greedy_tokens(directory, tuple(sequence.prompt), NUM_OUTPUT_TOKENS)

    def test_sampling_that_reads_the_tokens_gets_them_first(self, checkpoint: CheckpointOf) -> None:
        kinds = [
            SamplingParams(temperature=0.8, top_p=0.9, seed=1),
            SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5, logprobs=2),
            SamplingParams(temperature=0.7, bad_words=((7,), (8, 9)), min_tokens=4, stop_token_ids=(11,), seed=3),
        ]
        outputs = []
        for run_ahead in (False, True):
            stepper = Stepper(make_runner(checkpoint("llama")))
            for index, params in enumerate(kinds):
                stepper.add(str(index), Sequence(random_prompt(10 + index), params))
            if run_ahead:
                self.run_ahead(stepper, NUM_OUTPUT_TOKENS)
            else:
                stepper.run(num_output_tokens=NUM_OUTPUT_TOKENS)
            outputs.append({name: sequence.output for name, sequence in stepper.sequences.items()})
        assert outputs[0] == outputs[1]


class TestAdapters:
    """Graphs whose rows have adapters."""

    def test_rows_follow_the_slots_of_their_adapters(self, checkpoint: CheckpointOf, tmp_path: Path) -> None:
        directory = checkpoint("llama")
        adapters = {name: make_adapter(directory, tmp_path / name, seed=seed) for seed, name in enumerate("abcde")}
        lora = LoraConfig(
            allowed_directories=(str(tmp_path),),
            max_lora_rank=8,
            adapters={name: str(path) for name, path in adapters.items()},
        )
        runner = make_runner(directory, lora=lora)
        runner.warm_up()
        runner.capture_graphs(ModelConfig(model=str(directory), cuda_graph_sizes=(4,)), 16, lambda text: None)
        stepper = Stepper(runner)
        prompt = random_prompt(20)

        def run_with(*names: str | None) -> None:
            for index, name in enumerate(names):
                key = None if name is None else adapter_of(adapters[name], name).key
                stepper.add(str(index), Sequence(prompt, lora_name=key))
            outputs = stepper.run(num_output_tokens=8)
            for index, name in enumerate(names):
                wanted = (
                    greedy_tokens(directory, tuple(prompt), 8)
                    if name is None
                    else adapted_tokens(directory, adapters[name], prompt, 8)
                )
                assert outputs[str(index)] == wanted, name
                stepper.finish(str(index))

        run_with("a", "b", None)
        # More adapters than slots: the ones of the first batch lose theirs.
        run_with("c", "d", "e", "a")
        run_with(None, None)
        assert runner._graphs is not None
        assert runner._graphs.num_replays == 3 * 7


class TestHandoff:
    """A request from one engine to another, both on the device."""

    def test_engines_wait_for_their_tokens_only(self, checkpoint: CheckpointOf) -> None:
        directory = checkpoint("llama")
        config = engine_config(directory, block_size=8, overlap=True)
        prompts = {str(length): random_prompt(length) for length in PROMPT_LENGTHS}
        with EnginePair(config, config) as pair:
            SIMULATION.take_waits()
            for name, prompt in prompts.items():
                params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
                pair.hand_over(name, prompt, params)
            pair.run()
            waits = SIMULATION.take_waits()
            for name, prompt in prompts.items():
                assert pair.answers[name].token_ids == greedy_tokens(directory, tuple(prompt), NUM_OUTPUT_TOKENS)
            assert set(waits) == set(WAITS_OF_A_STEP), "blocks are gathered and sent without a wait"
            pair.assert_whole()


class NoLinks:
    """A connector that moves nothing."""

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        assert not metadata.staged

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        pass

    def take_output(self) -> KVConnectorOutput:
        return KVConnectorOutput()

    def shutdown(self) -> None:
        pass


class TestTransfers:
    """Bytes beside the steps: the engine's thread waits for none of them."""

    def test_bytes_are_staged_without_a_wait(self) -> None:
        cache = torch.ones(LAYOUT.shape, device=DEVICE)
        key = TransferKey(TransferKind.BYTES_FETCH, "fetch-1")
        data = bytes(range(1, 101))
        side = StagingSide(NoLinks(), cache)
        side.start_step(KVConnectorMetadata(staged=(StagedBytes(key, (5, 2), data),)))
        assert SIMULATION.take_waits() == {}
        # The bytes run through a block token by token.
        block = cache[5].permute(3, 0, 1, 2, 4).contiguous().view(-1).view(torch.uint8)
        assert bytes(block[: len(data)].tolist()) == data

    def test_a_store_copies_on_its_own_thread(self) -> None:
        cache = torch.arange(4 * 8, dtype=torch.float32, device=DEVICE).view(4, 1, 1, 2, 2, 2)
        before, done = cache[1].tolist(), threading.Event()
        SIMULATION.take_waits()
        copier = StoreCopier(cache, [HostMemoryWorker(2, 8 * 4, is_pinned=True)], done.set)
        block = StoredBlock(0, b"one", 1)
        try:
            copier.start_step(StoreMetadata(saves=(block,)))
            cache[1].zero_()  # The next step writes the block.
            copier.start_step(StoreMetadata(loads=(BlockLoad("a", (replace(block, block_id=3),)),)))
            assert done.wait(60.0)
            assert copier.take_loaded() == {"a": LoadedBlocks(1)}
        finally:
            copier.close()
        waits = set(SIMULATION.take_waits())
        assert waits == {f"kv_transfer/stores/store_copier.py:{name}" for name in ("_save", "_load_block")}
        assert cache[3].tolist() == before


class TestWaits:
    """A step waits for its results and for nothing else, whatever the requests ask for."""

    def test_sampling_of_any_kind_waits_once_a_step(self, checkpoint: CheckpointOf) -> None:
        runner = make_runner(checkpoint("llama"))
        stepper = Stepper(runner)
        kinds = [
            SamplingParams(temperature=0.8, top_p=0.9, seed=1),
            SamplingParams(temperature=1.1, top_k=20, min_p=0.05, seed=2, logprobs=3),
            SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.1),
            SamplingParams(temperature=0.0, logit_bias={5: 3.0}, allowed_token_ids=tuple(range(3, 90)), logprobs=1),
            SamplingParams(temperature=0.7, bad_words=((7,), (8, 9)), min_tokens=4, stop_token_ids=(11,), seed=3),
        ]
        for index, params in enumerate(kinds):
            stepper.add(str(index), Sequence(random_prompt(10 + index), params))
        SIMULATION.take_waits()
        stepper.run(num_output_tokens=6)
        assert SIMULATION.take_waits() == {place: 6 * count for place, count in WAITS_OF_A_STEP.items()}

    @pytest.mark.parametrize("has_draft_model", [False, True])
    def test_drafts_and_prompt_logprobs_wait_for_their_numbers_only(
        self, has_draft_model: bool, checkpoint: CheckpointOf
    ) -> None:
        directory = checkpoint("llama")
        speculative = EAGER
        if has_draft_model:
            speculative = EAGER.model_copy(update={"method": "draft_model", "model": str(directory)})
        params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, prompt_logprobs=2)
        with SpeculatingEngine(directory, speculative) as engine:
            SIMULATION.take_waits()
            prompt = random_prompt(20)
            seen = engine.run({"a": (prompt, params), "b": (prompt[:9] * 2, params)})
            waits = SIMULATION.take_waits()
            assert seen["a"].token_ids == greedy_tokens(directory, tuple(prompt), NUM_OUTPUT_TOKENS)
            assert set(waits) == set(WAITS_OF_A_STEP)
            assert engine.stats.num_draft_tokens > 0
