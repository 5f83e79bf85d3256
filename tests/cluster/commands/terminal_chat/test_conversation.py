"""Lines that are entered, and what becomes of the conversation."""

from __future__ import annotations

from cluster.commands.terminal_chat.conversation import Ask, Conversation, Leave, Say


def test_what_was_said_is_what_the_model_sees() -> None:
    conversation = Conversation(system="Be brief.")
    assert conversation.take("hi") == Ask()
    conversation.answered("hello")
    assert conversation.take("how\nare you?") == Ask()
    assert conversation.prompt() == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "how\nare you?"),
    ]


def test_a_question_without_an_answer_was_not_asked() -> None:
    conversation = Conversation()
    conversation.take("hi")
    conversation.answered("")
    assert conversation.prompt() == []


def test_the_last_question_is_asked_again() -> None:
    conversation = Conversation()
    assert conversation.take("/retry") == Say("there is no question to ask again yet")
    conversation.take("hi")
    conversation.answered("hello")
    assert conversation.take("/retry") == Ask()
    assert conversation.prompt() == [("user", "hi")]


def test_everything_but_the_system_prompt_is_forgotten() -> None:
    conversation = Conversation()
    assert conversation.take("/system Be brief.") == Say("system: Be brief.")
    conversation.take("hi")
    conversation.answered("hello")
    assert conversation.take("/reset") == Say("new conversation")
    assert conversation.prompt() == [("system", "Be brief.")]
    assert conversation.take("/system -") == Say("system: (nothing)")
    assert conversation.prompt() == []


def test_parameters_are_set_shown_and_taken_away() -> None:
    conversation = Conversation()
    assert conversation.take("/params") == Say("params: (defaults)")
    said = conversation.take('/params temperature=0.5 stop=["a b", "c"]  max_tokens=7')
    assert said == Say('params: temperature=0.5 stop=["a b", "c"] max_tokens=7')
    assert conversation.take("/params max_tokens=") == Say('params: temperature=0.5 stop=["a b", "c"]')
    assert conversation.params == {"temperature": 0.5, "stop": ["a b", "c"]}


def test_a_mistake_changes_nothing() -> None:
    conversation = Conversation(params={"seed": 1})
    said = conversation.take("/params temprature=0.5")
    assert isinstance(said, Say)
    assert "temperature" in said.text
    assert conversation.params == {"seed": 1}
    assert conversation.take("/sytem hello") == Say("there is no command /sytem; /help lists the commands")
    assert conversation.prompt() == []


def test_a_slash_can_be_said() -> None:
    conversation = Conversation()
    assert conversation.take("//etc") == Ask()
    assert conversation.prompt() == [("user", "/etc")]


def test_nothing_and_the_end() -> None:
    conversation = Conversation()
    assert conversation.take("  ") == Say("")
    assert [conversation.take("/exit"), conversation.take("/quit")] == [Leave(), Leave()]
    help_text = conversation.take("/help")
    assert isinstance(help_text, Say)
    assert all(f"/{name}" in help_text.text for name in ("system", "params", "retry", "reset", "exit"))
