"""`raypd generate`: stream one answer to the terminal."""

from __future__ import annotations

import sys
import time
from contextlib import closing

from cluster.client import BlockingClient, Options, Prompt
from cluster.commands.terminal_chat.meter import Meter
from cluster.commands.terminal_chat.screen import Screen


def stream_answer(client: BlockingClient, prompt: Prompt, options: Options, *, shows_times: bool) -> None:
    """Print the output as it arrives. Raises ClusterError.

    shows_times: print the times to the first token and per further token to standard error afterwards
    """
    screen, meter = Screen(sys.stdout), Meter(time.monotonic())
    try:
        with closing(client.generate(prompt, **options)) as responses:
            for response in responses:
                meter.count(len(response.token_ids), time.monotonic())
                screen.show(response.text)
    finally:
        screen.show("\n")
    if shows_times:
        print(meter.text(), file=sys.stderr)  # noqa: T201  # the command line's own
