"""Executors run the steps of an engine core on its workers."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.multimodal import EncoderInput, PackedArray
from actors.model_facts import ModelFacts
from actors.worker import Worker, WorkerStep


class RunningStep(Protocol):
    """A step that was given to the workers."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step's output. Raises what the worker raised."""


class Executor(Protocol):
    """Runs steps on every rank of the engine, in their order. MultiRankExecutor sends them to further ranks."""

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's facts."""

    def start(self, scheduler_output: SchedulerOutput) -> RunningStep:
        """Give a step to the workers; it runs after those before it."""

    def encode(self, image: EncoderInput) -> PackedArray:
        """Make an image's embeddings for another engine. Raises UnsupportedModel if the model takes none."""

    def take_other_pages(self) -> None:
        """Begin to take the memory of the KV cache that is not taken yet; steps may run meanwhile."""

    def shutdown(self) -> None:
        """Release memory, links and threads."""


class InProcessExecutor:
    """One worker, in the engine's own process."""

    def __init__(self, worker: Worker, *, overlap: bool = False) -> None:
        """overlap: give the worker a thread of its own, so that start() does not wait for the step."""
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker") if overlap else None
        runner = worker.runner
        self._facts = ModelFacts(
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            layout=runner.layout,
            kv_transport=worker.kv_transport,
            pairing=worker.pairing,
            generates=runner.generates,
            pooling=runner.pooling,
            prompt_embeds_size=runner.prompt_embeds_size,
            images=runner.images,
            dtype=runner.dtype,
            attention_backend=runner.attention_backend,
            attention_reason=runner.attention_reason,
            linear_layers=runner.linear_layers,
            cpu_threads=str(runner.threads),
            cuda_graphs=runner.cuda_graphs,
            left_out_inputs=runner.left_out_inputs,
        )

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's facts."""
        return self._facts

    def start(self, scheduler_output: SchedulerOutput) -> RunningStep:
        """Compute a step, in the worker's thread if it has one."""
        if self._thread is not None:
            return _LaunchedStep(self._thread, self._thread.submit(self._worker.launch, scheduler_output))
        return _FinishedStep(self._worker.execute_model(scheduler_output))

    def encode(self, image: EncoderInput) -> PackedArray:
        """Make an image's embeddings, in the worker's thread if it has one."""
        if self._thread is not None:
            return self._thread.submit(self._worker.runner.encode, image).result()
        return self._worker.runner.encode(image)

    def take_other_pages(self) -> None:
        """Begin to take the memory of the KV cache that is not taken yet; steps may run meanwhile."""
        self._worker.take_other_pages()

    def shutdown(self) -> None:
        """Let the step that runs end, then close the worker's links."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._worker.shutdown()


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step that the worker's thread launches before the step after it."""

    thread: ThreadPoolExecutor
    launched: Future[WorkerStep]

    def result(self) -> ModelRunnerOutput:
        step = self.launched.result()
        return step.result() if step.is_finished else self.thread.submit(step.result).result()


@dataclass(frozen=True, slots=True)
class _FinishedStep:
    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output
