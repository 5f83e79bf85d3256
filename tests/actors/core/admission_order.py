"""First come, first served, as far as it is promised."""

from __future__ import annotations

from collections.abc import Iterable

from actors.config import SchedulerConfig
from actors.core.requests.request import Request


def check_admission_order(config: SchedulerConfig, requests: Iterable[Request]) -> None:
    """requests: in the order in which they came. Only who waits for something else than room may be overtaken."""
    requests = list(requests)
    num_ingresses = len({request.client_index for request in requests})
    is_shared = config.fairness == "tenant" or (config.fairness == "ingress" and num_ingresses > 1)
    if config.policy != "fcfs" or is_shared:
        return
    overtaken = None
    for request in filter(_waits_for_room_only, requests):
        if request.scheduled_at_s is not None:
            assert overtaken is None, f"{request.request_id} was admitted before {overtaken}"
        elif not request.is_finished():
            overtaken = overtaken or request.request_id


def _waits_for_room_only(request: Request) -> bool:
    waits_for_others = request.kv_transfer_params or request.lora_name or request.sampling_params.structured_output
    return not waits_for_others and request.prefix_wait is None
