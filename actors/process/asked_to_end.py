"""RAY: a worker process that is told to end (SIGTERM) first says so, and lets its controller drain it.

Ray ends a worker at once on SIGTERM. Its handler can only be replaced from the main thread, where no actor code runs;
but what the handler calls is looked up when the signal comes, and that can be replaced. With a Ray in which it is not
there any more, SIGTERM ends the process at once, as before.
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

import ray._private.worker as ray_worker

logger = logging.getLogger(__name__)

_CALLED_BY_HANDLER = "raise_sys_exit_with_custom_error_message"


def on_request_to_end() -> threading.Event:
    """An event that the first SIGTERM sets, instead of ending this process; a second one ends it.

    In a Ray that the driver has started itself SIGTERM is blocked (cluster/start/local_ray.py); here it is heard again,
    by the thread that calls this.
    """
    is_asked = threading.Event()
    end_process = getattr(ray_worker, _CALLED_BY_HANDLER, None)
    if end_process is None:
        logger.warning("this Ray ends workers at once on SIGTERM: drain engines before their nodes are stopped")
        return is_asked

    def note(*arguments: Any, **options: Any) -> None:
        if is_asked.is_set():
            end_process(*arguments, **options)
        is_asked.set()

    setattr(ray_worker, _CALLED_BY_HANDLER, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return is_asked
