"""An engine of a scheduler, a worker that checks every slot, and its end of the simulated links."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.request import Request, RequestStatus
from actors.core.scheduler import Scheduler
from kv_transfer.agent.transfer_table import TransferTable
from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.connector.steps import KVConnectorMetadata, Reservation
from tests.actors.core.builders import BLOCK_SIZE, Clock
from tests.actors.core.fakes import FakeWorker, prefix_digests
from tests.kv_transfer.reported import Reported, key_of

GARBAGE = -99


@dataclass
class SimulatedEngine:
    """Steps go through three stages, in order: planned, executed, taken in. Its agent may lag behind its steps."""

    scheduler: Scheduler
    table: TransferTable
    clock: Clock
    max_in_flight: int
    worker: FakeWorker = field(init=False)
    submitted: dict[str, Request] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    """All tokens that they came with."""
    aborted: set[str] = field(default_factory=set)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    planned: deque[SchedulerOutput] = field(default_factory=deque)
    executed: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)
    agent_inbox: deque[Callable[[], None]] = field(default_factory=deque)
    promised: dict[str, Reservation] = field(default_factory=dict)
    """Loads whose report is not out: a link may write their blocks, those received excepted."""
    received: set[int] = field(default_factory=set)
    reported: Reported = field(default_factory=Reported)
    """All that was ever reported."""

    def __post_init__(self) -> None:
        self.worker = FakeWorker(self.scheduler.kv_cache_manager.block_pool.num_blocks, BLOCK_SIZE)

    def submit(self, request: Request) -> None:
        self.submitted[request.request_id] = request
        self.prompts[request.request_id] = list(request.all_token_ids)
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # -- steps ---------------------------------------------------------------------------------------------------

    def may_schedule(self) -> bool:
        return len(self.planned) + len(self.executed) < self.max_in_flight

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        config = self.scheduler.config
        assert output.total_num_scheduled_tokens <= config.max_num_batched_tokens
        assert len(output.batch) <= config.max_num_seqs
        self.planned.append(output)
        return output

    def execute(self) -> None:
        output = self.planned.popleft()
        metadata = output.kv_connector_metadata
        assert metadata is not None
        for reservation in metadata.reservations:
            self.promised[reservation.key.name] = reservation
            self.received -= set(reservation.block_ids[reservation.num_local_blocks :])
        self.scribble()
        self.agent_inbox.append(lambda: self._start_step(metadata))
        model_output = self.worker.execute(output)
        self.agent_inbox.append(lambda: self.table.on_computed(metadata.progress))
        model_output.kv_connector_output = self._take_output()
        self.executed.append((output, model_output))

    def _start_step(self, metadata: KVConnectorMetadata) -> None:
        self.table.on_step(metadata, self.clock())

    def _take_output(self) -> KVConnectorOutput:
        output = self.table.take_output(num_links=1)
        for name in Reported.of(output).finished_recving:
            self.promised.pop(key_of(name).name, None)
        return output

    def update(self) -> bool:
        """Take the oldest executed step in; returns whether it brought any news."""
        output, model_output = self.executed.popleft()
        outputs = [one for client in self._take_in(output, model_output) for one in client]
        self.outputs += outputs
        transfers = model_output.kv_connector_output
        assert transfers is not None
        self.reported.merge(transfers)
        return bool(outputs) or not transfers.is_empty() or not output.is_empty()

    def _take_in(self, output: SchedulerOutput, model_output: ModelRunnerOutput) -> list[list[EngineCoreOutput]]:
        return [client.outputs for client in self.scheduler.update_from_output(output, model_output).values()]

    def agent_works(self) -> bool:
        if not self.agent_inbox:
            return False
        self.agent_inbox.popleft()()
        return True

    def step(self) -> bool:
        """Schedule as far ahead as the engine goes, then take one step in; returns whether anything happened."""
        while self.may_schedule():
            self.schedule()
        if self.planned:
            self.execute()
        while self.agent_works():
            pass
        return self.update()

    # -- blocks --------------------------------------------------------------------------------------------------

    def read_block(self, block_id: int) -> list[int]:
        return self.worker.slots[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE]

    def write_block(self, block_id: int, contents: list[int]) -> None:
        self.worker.slots[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE] = contents
        self.received.add(block_id)

    def scribble(self) -> None:
        """A link may write anything into blocks that were promised to it and are not complete."""
        for reservation in self.promised.values():
            for block_id in reservation.block_ids[reservation.num_local_blocks :]:
                if block_id not in self.received:
                    self.worker.slots[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE] = [GARBAGE] * BLOCK_SIZE

    def check_promised(self) -> None:
        """A load's blocks belong to its request, dead or alive, until its report."""
        for request_id, reservation in self.promised.items():
            kv = self.scheduler.kv_cache_manager
            if reservation.fetch is not None:
                # What is here already is no part of a fetch.
                held = kv.get_block_ids(request_id) + kv.states.get_block_ids(request_id)
                assert set(reservation.block_ids) <= set(held), f"{request_id} lost its blocks"
                continue
            num_blocks = kv.num_blocks_for(reservation.num_prompt_tokens)
            held = kv.get_block_ids(request_id)[:num_blocks] + kv.states.get_block_ids(request_id)
            assert tuple(held) == reservation.block_ids, f"{request_id} lost its blocks"

    def check_leaving(self, request_id: str, block_ids: list[int]) -> None:
        """Blocks that are being sent belong to their request, and hold its KV."""
        held = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        digests = prefix_digests(self.prompts[request_id])
        state_ids = self.scheduler.kv_cache_manager.states.get_block_ids(request_id)
        for block_id in block_ids:
            if block_id in state_ids:
                self.worker.check_state([block_id], self.prompts[request_id])
                continue
            assert block_id in held, f"{request_id} lost a block that is being sent"
            first = held.index(block_id) * BLOCK_SIZE
            right = digests[first : first + BLOCK_SIZE]
            assert self.read_block(block_id)[: len(right)] == right, "wrong KV is being sent"

    # -- questions -----------------------------------------------------------------------------------------------

    def tokens_of(self, request_id: str) -> tuple[int, list[int]]:
        """Position of the first token that its client got here, and all of them, checked to be without gap."""
        token_ids: list[int] = []
        first = 0
        for output in self.outputs:
            if output.request_id == request_id and output.new_token_ids:
                first = first if token_ids else output.first_position
                assert output.first_position == first + len(token_ids), "a gap or a token twice"
                token_ids += output.new_token_ids
        return first, token_ids

    def ends_of(self, request_id: str) -> list[EngineCoreOutput]:
        return [output for output in self.outputs if output.request_id == request_id and output.finished]
