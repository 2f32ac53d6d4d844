"""`sagellm chat`: turns, /reset, /exit, and Ctrl-C that stops an answer only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.cli.chat import CLOSE, DIM, OPEN, PLAIN, Conversation, DimmedReasoning
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ContextLengthError
from sagellm.engines.llm import TextDelta, Usage


def lines(*typed: str | BaseException | type[BaseException]) -> Callable[[str], str]:
    """An `input` that gives these lines, or raises, and then ends."""
    stream: Iterator[str | BaseException | type[BaseException]] = iter([*typed, EOFError])

    def read(_prompt: str) -> str:
        line = next(stream)
        if isinstance(line, str):
            return line
        raise line

    return read


def talk(
    fake: Any, *given: str | BaseException | type[BaseException], system: str | None = None
) -> Conversation:
    conversation = Conversation(fake, None, system)
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
    assert "/help  commands" in result.stderr
    assert made[0].closed


def test_a_line_that_is_no_text_ends_nothing(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    talk(fake, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "one two")
    assert "that is no utf-8 text" in capsys.readouterr().err
    assert len(fake.asked) == 1


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        (["one \\", "two\\", "three"], "one \ntwo\nthree"),
        (['"""', "def f():", "    return 1", '"""'], "def f():\n    return 1"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one"""'], "one"),
        (["one\\", EOFError], "one"),
        (['"""', "one", EOFError], "one"),
    ],
)
def test_a_question_may_have_several_lines(fake: Any, typed: list[Any], asked: str) -> None:
    talk(fake, *typed)
    assert [one[0][-1]["content"] for one in fake.asked] == [asked]


def test_a_pipe_gets_no_prompts(fake: Any) -> None:
    prompts = []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        raise EOFError

    for is_terminal in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", SimpleNamespace(isatty=lambda answer=is_terminal: answer))
            Conversation(fake).talk(read)
    assert prompts == ["", "> "]


def test_sampling_parameters_are_set_and_taken_back(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    talk(fake, "/set temperature 0.5", "/set stop a b", "one", "/set", "/set temperature default", "two")
    first, second = (options.params for _, options in fake.asked)
    assert (first.temperature, first.stop) == (0.5, ("a b",))
    assert (second.temperature, second.stop) == (1.0, ("a b",))
    assert "(temperature 0.5, stop ('a b',))" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temp 1", "no sampling parameter 'temp'. Did you mean 'temperature'?"),
        ("/set top_k many", "top_k is 'many': write a whole number"),
        ("/set top_p 3", "top_p"),
        ("/set temperature", "/set NAME VALUE"),
    ],
)
def test_what_cannot_be_set_changes_nothing(
    fake: Any, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    talk(fake, "/set temperature 0.5", line, "one")
    assert said in capsys.readouterr().err
    params = fake.asked[0][1].params
    assert (params.temperature, params.top_p) == (0.5, 1.0)


def test_stats_of_the_last_answer_and_of_all(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    conversation = Conversation(fake, clock=clock)

    def answer(*_: Any) -> Iterator[TextDelta]:
        clock.advance(0.5)
        yield TextDelta("r", 0, "x", (1,), Usage(10, 5, 4))

    fake.stream = answer
    for line in ("/stats", "one", "two", "/stats"):
        conversation.turn(line)
    assert capsys.readouterr().err.splitlines() == [
        "(no answer yet)",
        "last answer: 10 prompt tokens (4 cached), 5 generated, 0.50 s, 10.0 tokens/s",
        "all answers: 20 prompt tokens (8 cached), 10 generated, 1.00 s, 10.0 tokens/s",
    ]


@given(
    st.lists(st.sampled_from([OPEN, CLOSE, "a", "b ", "<", "<th", "ink>", "</", "think>", ">"])), st.data()
)
def test_dimming_adds_escapes_alone_wherever_the_text_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    at_once, in_pieces = DimmedReasoning(), DimmedReasoning()
    whole = at_once.push(text) + at_once.finish()
    assert "".join(map(in_pieces.push, pieces)) + in_pieces.finish() == whole
    assert whole.replace(DIM, "").replace(PLAIN, "") == text
    assert whole.count(DIM) == whole.count(PLAIN)


def test_reasoning_is_dimmed_on_a_terminal_only(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for dimmed in (False, True):
        Conversation(fake, dimmed=dimmed).turn(f"42 {CLOSE} sum {OPEN}")
    plain, dim = capsys.readouterr().out.splitlines()
    assert plain == f"{OPEN} sum {CLOSE} 42 "
    assert dim == f"{DIM}{OPEN} sum {CLOSE}{PLAIN} 42 "
