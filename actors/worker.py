"""One tensor-parallel rank: a model runner and the worker side of the connector around it."""

from __future__ import annotations

from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.model.launched_step import LaunchedStep
from actors.model.model_runner import ModelRunner
from kv_transfer.connector.interface import KVConnectorWorker
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.links.link_compatibility import PairingFacts
from kv_transfer.transports.shared_pool import take_other_pages


class WorkerStep:
    """A step that a worker has launched."""

    def __init__(
        self,
        launched: LaunchedStep,
        connector: KVConnectorWorker | None,
        adapter_loads: dict[str, str | None] | None,
    ) -> None:
        """Take the reports at once if the step is finished."""
        self._launched, self._connector, self._adapter_loads = launched, connector, adapter_loads
        self._output: ModelRunnerOutput | None = None
        if launched.is_finished:
            self.result()

    @property
    def is_finished(self) -> bool:
        """Whether result() returns at once, and may be called by any thread."""
        return self._output is not None

    def result(self) -> ModelRunnerOutput:
        """Wait for the step's outputs."""
        if self._output is None:
            output = self._launched.result()
            if self._adapter_loads is not None:
                output.adapter_loads = self._adapter_loads
            if self._connector is not None:
                output.kv_connector_output = self._connector.take_output()
            self._output = output
        return self._output


class Worker:
    """Runs steps. Transfers begin before a forward and get its KV after it; a step never waits for a transfer."""

    def __init__(
        self,
        runner: ModelRunner,
        connector: KVConnectorWorker | None,
        kv_transport: str = "",
        pairing: PairingFacts | None = None,
    ) -> None:
        """connector: None if no KV is transferred; kv_transport, pairing: see ModelFacts."""
        self.runner = runner
        self.kv_transport = kv_transport
        self.pairing = pairing
        self._connector = connector
        self._has_taken_pages = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; the output also has this rank's transfer reports and adapter loads since the last step."""
        return self.launch(scheduler_output).result()

    def launch(self, scheduler_output: SchedulerOutput) -> WorkerStep:
        """Begin what execute_model() does; see ModelRunner.launch()."""
        adapters, adapter_loads = self.runner.adapters, None
        if adapters is not None:
            if scheduler_output.adapter_commands is not None:
                adapters.obey(scheduler_output.adapter_commands)
            adapter_loads = adapters.take_results()
        if self._connector is None:
            return WorkerStep(self.runner.launch(scheduler_output), None, adapter_loads)
        metadata = scheduler_output.kv_connector_metadata or KVConnectorMetadata()
        self._connector.start_step(metadata)
        launched = self.runner.launch(scheduler_output)
        self._connector.finish_step(metadata)
        return WorkerStep(launched, self._connector, adapter_loads)

    def take_other_pages(self) -> None:
        """Begin to take the memory of the KV cache that is not taken yet; later calls do nothing.

        This runs on a thread, while steps may run.
        """
        if not self._has_taken_pages:
            self._has_taken_pages = True
            take_other_pages(self.runner.kv_cache)

    def shutdown(self) -> None:
        """Close the connector's links and threads, and stop loading adapters."""
        if self.runner.adapters is not None:
            self.runner.adapters.shutdown()
        if self._connector is not None:
            self._connector.shutdown()
