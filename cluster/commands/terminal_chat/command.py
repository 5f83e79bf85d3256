"""The loop of `raypd chat`: read a message, send the conversation, show the answer."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client import BlockingClient, CallFailed
from cluster.commands.terminal_chat.conversation import Ask, Conversation, Leave, Say
from cluster.commands.terminal_chat.keyboard import Keyboard
from cluster.commands.terminal_chat.meter import Meter
from cluster.commands.terminal_chat.screen import Screen


def chat(client: BlockingClient, conversation: Conversation, history: Path | None) -> None:
    """Chat until the user leaves.

    Ctrl-C stops an answer; the part of it that has arrived stays in the conversation.
    history: the file for the history of typed lines; None keeps none
    """
    screen = Screen(sys.stdout)
    with Keyboard(history) as keyboard:
        goes_on = True
        while goes_on:
            try:
                goes_on = _take_turns(keyboard, client, conversation, screen)
            except KeyboardInterrupt:
                # Ctrl-C while the user types drops the line.
                screen.show("\n(Ctrl-D or /exit leaves)\n")


def _take_turns(keyboard: Keyboard, client: BlockingClient, conversation: Conversation, screen: Screen) -> bool:
    """Read one message or command and carry it out. Returns whether the chat goes on."""
    text = keyboard.read()
    if text is None:
        return False
    match conversation.take(text):
        case Ask():
            _answer(client, conversation, screen)
        case Say(text=said):
            screen.show(said + "\n" * bool(said))
        case Leave():
            return False
    return True


def _answer(client: BlockingClient, conversation: Conversation, screen: Screen) -> None:
    texts: list[str] = []
    meter, note = Meter(time.monotonic()), ""
    try:
        with closing(client.chat(conversation.prompt(), **conversation.params)) as responses:
            screen.show("", meter.text())
            for response in responses:
                texts.append(response.text)
                meter.count(len(response.token_ids), time.monotonic())
                screen.show(response.text, meter.text())
                if response.finish_reason == generate_pb2.FINISH_REASON_LENGTH:
                    note = " · max_tokens reached"
    except KeyboardInterrupt:
        note = " · stopped"
    except CallFailed as error:
        note = f" · {error}"
    conversation.answered("".join(texts))
    screen.end(meter.text() + note)
