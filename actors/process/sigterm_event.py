"""RAY: turns the first SIGTERM of a worker process into an event, so that the controller can drain the process first.

Ray ends a worker at once on SIGTERM. Ray's signal handler can only be replaced from the main thread, where no actor
code runs. But the handler looks up the function that it calls when the signal comes, and this function can be replaced.
In a version of Ray that lacks the function, SIGTERM ends the process at once, as before.
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
    """Return an event that the first SIGTERM sets instead of ending this process; a second SIGTERM ends it.

    If raypd's driver has started Ray, SIGTERM is blocked in workers (cluster/start/local_ray.py); this function
    unblocks it for the calling thread.
    """
    is_asked = threading.Event()
    end_process = getattr(ray_worker, _CALLED_BY_HANDLER, None)
    if end_process is None:
        logger.warning(
            "this version of Ray ends workers at once on SIGTERM: drain engines before their nodes are stopped"
        )
        return is_asked

    def note(*arguments: Any, **options: Any) -> None:
        if is_asked.is_set():
            end_process(*arguments, **options)
        is_asked.set()

    setattr(ray_worker, _CALLED_BY_HANDLER, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return is_asked
