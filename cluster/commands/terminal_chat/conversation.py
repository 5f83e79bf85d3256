"""A conversation, and the commands that change it. Pure: text for the user is returned, not printed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.client.options import ChatTurn
from cluster.commands.terminal_chat.sampling_words import parse_assignments

HELP: Final = """\
/system TEXT        set the system message; without TEXT, show it; /system - removes it
/params NAME=VALUE  set sampling parameters, such as temperature=0.7 max_tokens=200 stop=["\\n\\n"]; NAME= removes one
/retry              ask the last question again
/reset              start a new conversation; system message and parameters stay
/help               show this help
/exit               end the chat, like Ctrl-D
A line that ends with \\ continues on the next line; \"\"\" begins and ends a text of several lines.
A line that begins with // is sent with a single /.
Ctrl-C stops an answer."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An action: send the conversation to the model."""


@dataclass(frozen=True, slots=True)
class Say:
    """An action: show this text to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    """An action: end the program."""


Action = Ask | Say | Leave


@dataclass(slots=True)
class Conversation:
    """A conversation: the messages so far, and how answers are sampled.

    system: the system message; empty for none
    params: sampling parameters by name
    turns:  the messages, oldest first; the last one is the user's while an answer is expected
    """

    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    turns: list[ChatTurn] = field(default_factory=list)

    def prompt(self) -> list[ChatTurn]:
        """Return all messages for the model, the system message first."""
        return [*([("system", self.system)] if self.system else []), *self.turns]

    def take(self, text: str) -> Action:
        """Take in what the user has entered, a message or a /command. Returns what to do."""
        if not text.strip():
            return Say("")
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text[1:].partition(" ")
            return self._obey(name, argument.strip())
        self.turns.append(("user", text.removeprefix("/") if text.startswith("//") else text))
        return Ask()

    def answered(self, text: str) -> None:
        """Add the model's answer, or the part of it that has arrived; without any text, take the question back."""
        if text:
            self.turns.append(("assistant", text))
        else:
            self.give_up()

    def give_up(self) -> None:
        """Take back the last question, which has got no answer."""
        if self.turns and self.turns[-1][0] == "user":
            self.turns.pop()

    def _obey(self, name: str, argument: str) -> Action:
        match name:
            case "help":
                return Say(HELP)
            case "exit" | "quit":
                return Leave()
            case "reset":
                self.turns.clear()
                return Say("new conversation")
            case "retry":
                return self._retry()
            case "system":
                return self._set_system(argument)
            case "params":
                return self._set_params(argument)
        return Say(f"there is no command /{name}; /help lists the commands")

    def _retry(self) -> Action:
        if len(self.turns) < 2:
            return Say("there is no question to ask again yet")
        self.turns.pop()
        return Ask()

    def _set_system(self, text: str) -> Action:
        if text:
            self.system = "" if text == "-" else text
        return Say(f"system: {self.system or '(nothing)'}")

    def _set_params(self, text: str) -> Action:
        try:
            # Only whitespace before a name and its "=" separates assignments: values may contain whitespace too.
            assignments = parse_assignments(re.split(r"\s+(?=\w+=)", text) if text else [])
        except ValueError as error:
            return Say(str(error))
        self.params = {name: value for name, value in (self.params | assignments).items() if value is not None}
        shown = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in self.params.items())
        return Say(f"params: {shown or '(defaults)'}")
