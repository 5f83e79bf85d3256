"""The phases of requests as constants: in Python 3.11 to read a member of an enum takes as long as to make a span."""

from __future__ import annotations

from typing import Final

from cluster.observability.stories.request_story import Phase

ADMISSION: Final = Phase.ADMISSION
QUEUE: Final = Phase.QUEUE
RESERVATION: Final = Phase.RESERVATION
PREFILL: Final = Phase.PREFILL
TRANSFER_HIDDEN: Final = Phase.TRANSFER_HIDDEN
TRANSFER_EXPOSED: Final = Phase.TRANSFER_EXPOSED
BATCH: Final = Phase.BATCH
DECODE: Final = Phase.DECODE
PREEMPTED: Final = Phase.PREEMPTED
RECOVERY: Final = Phase.RECOVERY
UNREPORTED: Final = Phase.UNREPORTED
