"""How an engine core reaches its workers."""

from __future__ import annotations

from typing import Protocol

from actors.config import ModelFacts
from actors.core.outputs import ModelRunnerOutput, SchedulerOutput
from actors.worker import Worker


class Executor(Protocol):
    """Runs a step on every rank of the engine. The Ray executor fans out to further ranks."""

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's facts."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. Blocks until its tokens are sampled."""

    def shutdown(self) -> None:
        """Release memory, links and threads."""


class InProcessExecutor:
    """One worker, in the engine's own process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        runner = worker.runner
        self._facts = ModelFacts(
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            layout=runner.layout,
        )

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's facts."""
        return self._facts

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step in this thread."""
        return self._worker.execute_model(scheduler_output)

    def shutdown(self) -> None:
        """Close the worker's links."""
        self._worker.shutdown()
