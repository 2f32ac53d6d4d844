"""`sagellm chat`: turns, /reset, /exit, and Ctrl-C that stops an answer only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sagellm.cli.chat import Conversation
from sagellm.core.errors import ContextLengthError
from sagellm.core.types import SamplingParams


def lines(*given: str | BaseException | type[BaseException]) -> Callable[[str], str]:
    """An `input` that gives these lines, or raises, and then ends."""
    stream: Iterator[str | BaseException | type[BaseException]] = iter([*given, EOFError])

    def read(_prompt: str) -> str:
        line = next(stream)
        if isinstance(line, str):
            return line
        raise line

    return read


def talk(
    fake: Any, *given: str | BaseException | type[BaseException], system: str | None = None
) -> Conversation:
    conversation = Conversation(fake, SamplingParams(), system)
    conversation.talk(lines(*given))
    return conversation


def test_the_second_turn_carries_the_first(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    talk(fake, "one two", "three")
    assert fake.asked[1][0] == [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "two one "},
        {"role": "user", "content": "three"},
    ]
    assert capsys.readouterr().out == "two one \nthree \n"


def test_reset_forgets_all_but_the_system_message(fake: Any) -> None:
    conversation = talk(fake, "one", "/reset", system="be brief")
    assert conversation.messages == [{"role": "system", "content": "be brief"}]


def test_exit_leaves_and_the_rest_is_not_read(fake: Any) -> None:
    talk(fake, "one", "/exit", "two")
    assert len(fake.asked) == 1


def test_help_blank_lines_and_ctrl_c_at_the_prompt_ask_nothing(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(fake, "/help", "  ", KeyboardInterrupt)
    assert not fake.asked
    assert "/reset" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_program(fake: Any) -> None:
    fake.interrupt_after = 1
    conversation = talk(fake, "one two three", "again")
    assert conversation.messages[1] == {"role": "assistant", "content": "three "}
    assert len(fake.asked) == 2
    assert fake.closed_streams == 2


def test_a_question_that_fails_leaves_no_trace(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any) -> Iterator[Any]:
        yield from ()
        raise ContextLengthError(8, "the prompt has 9")

    conversation = talk(fake, "one")
    fake.stream = refuse
    conversation.turn("two")
    assert [message["content"] for message in conversation.messages] == ["one", "one "]
    assert "too long" in capsys.readouterr().err


def test_the_command_reads_stdin(cli: Any, made: Any) -> None:
    result = cli("chat", stdin="a b\n/exit\n")
    assert result.exit_code == 0
    assert "b a \n" in result.stdout
    assert "/exit  leave" in result.stderr
    assert made[0].closed


def test_a_line_that_is_no_text_ends_nothing(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    talk(fake, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "one two")
    assert "that is no utf-8 text" in capsys.readouterr().err
    assert len(fake.asked) == 1
