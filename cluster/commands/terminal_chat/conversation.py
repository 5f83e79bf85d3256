"""A conversation and what its line commands do to it. Pure: what the user sees comes back as text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.client.options import ChatTurn
from cluster.commands.terminal_chat.sampling_words import parse_assignments

HELP: Final = """\
/system TEXT        what the model is told before everything else; without TEXT, show it; /system - takes it away
/params NAME=VALUE  sampling parameters, such as temperature=0.7 max_tokens=200 stop=["\\n\\n"]; NAME= takes one away
/retry              ask the last question again
/reset              forget what was said
/help               this
/exit               leave, as Ctrl-D does
A line that ends with \\ goes on in the next one; \"\"\" begins and ends a text of several.
A line that begins with // is said with one /.
Ctrl-C stops an answer."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the conversation."""


@dataclass(frozen=True, slots=True)
class Say:
    """Show this."""

    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    """End the program."""


Action = Ask | Say | Leave


@dataclass(slots=True)
class Conversation:
    """A conversation: the messages so far, and how answers are sampled.

    turns: ends with the user's while an answer is wanted
    """

    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    turns: list[ChatTurn] = field(default_factory=list)

    def prompt(self) -> list[ChatTurn]:
        """All that the model is to see."""
        return [*([("system", self.system)] if self.system else []), *self.turns]

    def take(self, text: str) -> Action:
        """Something that the user has entered."""
        if not text.strip():
            return Say("")
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text[1:].partition(" ")
            return self._obey(name, argument.strip())
        self.turns.append(("user", text.removeprefix("/") if text.startswith("//") else text))
        return Ask()

    def answered(self, text: str) -> None:
        """The model's answer, or what there was of it when it was stopped."""
        if text:
            self.turns.append(("assistant", text))
        else:
            self.give_up()

    def give_up(self) -> None:
        """There is no answer: as if it had not been asked."""
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
                return Say("forgotten")
            case "retry":
                return self._retry()
            case "system":
                return self._set_system(argument)
            case "params":
                return self._set_params(argument)
        return Say(f"there is no /{name}; /help shows what there is")

    def _retry(self) -> Action:
        if len(self.turns) < 2:
            return Say("nothing was asked yet")
        self.turns.pop()
        return Ask()

    def _set_system(self, text: str) -> Action:
        if text:
            self.system = "" if text == "-" else text
        return Say(f"system: {self.system or '(nothing)'}")

    def _set_params(self, text: str) -> Action:
        try:
            # Between two of them is the whitespace before a name and its "=": values may have some too.
            assignments = parse_assignments(re.split(r"\s+(?=\w+=)", text) if text else [])
        except ValueError as error:
            return Say(str(error))
        self.params = {name: value for name, value in (self.params | assignments).items() if value is not None}
        shown = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in self.params.items())
        return Say(f"params: {shown or '(defaults)'}")
