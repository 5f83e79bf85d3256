"""Reports of a connector's worker side by their kinds, as tests write and read them.

A request's id stands for the key of its handoff; what is no handoff stands under its whole key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kv_transfer.connector.fetches import WantedFetch
from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.reports import (
    FailedSending,
    FetchWanted,
    FinishedLoading,
    FinishedReceiving,
    FinishedSending,
    KVConnectorOutput,
    PartFailed,
    ReadyToPrefill,
    ReceivedKV,
    TransferReport,
)
from kv_transfer.connector.store_steps import LoadedBlocks
from kv_transfer.transfer_stats import TransferStats

Name = str | TransferKey


@dataclass
class Reported:
    """Reports that have come, or are going to be made."""

    ready_to_prefill: set[Name] = field(default_factory=set)
    failed_sending: dict[Name, str] = field(default_factory=dict)
    finished_sending: set[Name] = field(default_factory=set)
    part_failed: set[Name] = field(default_factory=set)
    finished_recving: dict[Name, ReceivedKV] = field(default_factory=dict)
    received_bytes: dict[Name, bytes] = field(default_factory=dict)
    finished_loading: dict[str, LoadedBlocks] = field(default_factory=dict)
    wants: list[WantedFetch] = field(default_factory=list)
    stats: TransferStats | None = None

    @classmethod
    def of(cls, output: KVConnectorOutput) -> Reported:
        """The reports of an output."""
        reported = cls(stats=output.stats)
        for report in output.reports:
            reported._add(report)
        return reported

    def merge(self, output: KVConnectorOutput) -> None:
        """Add what happened afterwards."""
        for report in output.reports:
            self._add(report)
        self.stats = output.stats or self.stats

    def output(self) -> KVConnectorOutput:
        """The output with these reports, in a fixed order."""
        received = self.finished_recving.items()
        reports: list[TransferReport] = [
            *(FetchWanted(want) for want in self.wants),
            *(FinishedLoading(request_id, loaded) for request_id, loaded in self.finished_loading.items()),
            *(ReadyToPrefill(key) for key in _sorted_keys(self.ready_to_prefill)),
            *(FailedSending(key_of(name), reason) for name, reason in self.failed_sending.items()),
            *(FinishedSending(key) for key in _sorted_keys(self.finished_sending)),
            *(PartFailed(key) for key in _sorted_keys(self.part_failed)),
            *(FinishedReceiving(key_of(name), kv, self.received_bytes.get(name)) for name, kv in received),
        ]
        return KVConnectorOutput(reports, self.stats)

    def _add(self, report: TransferReport) -> None:
        match report:
            case ReadyToPrefill(key):
                self.ready_to_prefill.add(name_of(key))
            case FailedSending(key, reason):
                self.failed_sending[name_of(key)] = reason
            case FinishedSending(key):
                self.finished_sending.add(name_of(key))
            case PartFailed(key):
                self.part_failed.add(name_of(key))
            case FinishedReceiving(key, received, data):
                self.finished_recving[name_of(key)] = received
                if data is not None:
                    self.received_bytes[name_of(key)] = data
            case FinishedLoading(request_id, loaded):
                self.finished_loading[request_id] = loaded
            case FetchWanted(want):
                self.wants.append(want)


def output_of(
    *,
    ready_to_prefill: Iterable[Name] = (),
    failed_sending: Mapping[str, str] | Mapping[Name, str] | None = None,
    finished_sending: Iterable[Name] = (),
    finished_recving: Mapping[str, ReceivedKV] | Mapping[TransferKey, ReceivedKV] | None = None,
    wants: Iterable[WantedFetch] = (),
) -> KVConnectorOutput:
    """An output with these reports."""
    reported = Reported(set(ready_to_prefill), finished_sending=set(finished_sending), wants=list(wants))
    for name, reason in (failed_sending or {}).items():
        reported.failed_sending[name] = reason
    for name, received in (finished_recving or {}).items():
        reported.finished_recving[name] = received
    return reported.output()


def key_of(name: Name) -> TransferKey:
    """The key of a request's handoff, or the key itself."""
    return TransferKey.of_handoff(name) if isinstance(name, str) else name


def name_of(key: TransferKey) -> Name:
    """The id of a handoff's request; the key itself, if it is of anything else, or of a part."""
    return key.name if key.kind is TransferKind.HANDOFF and key.part is None else key


def _sorted_keys(names: Iterable[Name]) -> list[TransferKey]:
    return sorted(key_of(name) for name in names)
