"""`sagellm chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from sagellm.cli._loading import load_llm
from sagellm.cli._options import Model, command, flag
from sagellm.cli._reasoning import Reasoning
from sagellm.cli._sampling import Sampling, parse_value
from sagellm.cli._settings import Settings
from sagellm.cli.run import interrupts_delayed
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import RequestError

if TYPE_CHECKING:
    from sagellm.core.protocols.tokenizer import Message
    from sagellm.engines.llm import LLM, Usage

HELP = """\
  /reset             forget the conversation
  /set               show the sampling parameters that were set
  /set NAME VALUE    set one, such as /set temperature 0.7; VALUE default: the model's own
  /stats             tokens and speed of the last answer, and of all
  /exit              leave (also Ctrl-D); Ctrl-C stops an answer
  Several lines: end a line with \\, or write them between two lines of \"\"\"."""
QUOTES = '"""'
OPEN, CLOSE = "<think>", "</think>"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@command
def chat(
    system: str | None = flag("TEXT", "System message."),
    *,
    model: Model,
    sampling: Sampling,
    reasoning: Reasoning,
    settings: Settings,
) -> None:
    """Talk to a model in the terminal.

    Ctrl-C stops an answer and not the program; /help lists the commands.
    """
    with closing(load_llm(settings.load(model=model.name).config)) as llm:
        with suppress(ImportError):  # a Python without readline edits lines as the terminal does
            import readline

            readline.set_history_length(1000)
        print(f"{llm.model_name}   /help  commands    Ctrl-D  leave", file=sys.stderr)
        dimmed = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        Conversation(llm, sampling.given(), system, reasoning, dimmed=dimmed).talk(input)


class Conversation:
    """The messages so far. A turn adds a question and its answer, or nothing if it fails.

    `given`: sampling parameters by name; `reasoning`: how it is made cheaper. With `dimmed`, escape sequences
    dim it.
    """

    def __init__(
        self,
        llm: LLM,
        given: Mapping[str, Any] | None = None,
        system: str | None = None,
        reasoning: Reasoning | None = None,
        *,
        dimmed: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._llm = llm
        self._given = dict(given or {})
        self._params = llm.sampling_params(**self._given)
        self._reasoning = reasoning or Reasoning()
        self._reasoning.for_request(self._params)  # a wrong value is an error now, not in each turn
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._dimmed = dimmed
        self._clock = clock or MonotonicClock()
        self._spent: list[tuple[Usage, float]] = []
        self.messages: list[Message] = list(self._opening)

    def talk(self, read: Callable[[str], str]) -> None:
        """Take turns until `/exit` or the end of input."""
        while True:
            try:
                text = _read_text(read)
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n(/exit leaves)", file=sys.stderr)
                continue
            except UnicodeDecodeError as error:
                print(f"(that is no {error.encoding} text: {error.reason})", file=sys.stderr)
                continue
            if text == "/exit":
                return
            self.turn(text)

    def turn(self, text: str) -> None:
        """Execute a command, or answer a question."""
        try:
            if text.startswith("/"):
                self._command(*text.split(maxsplit=2))
            elif text:
                self._ask(text)
        except RequestError as error:
            print(f"{error}  (/reset starts anew)" if self.messages else str(error), file=sys.stderr)

    def _command(self, name: str, *arguments: str) -> None:
        if name == "/reset":
            self.messages = list(self._opening)
            print("(forgotten)", file=sys.stderr)
        elif name == "/set" and len(arguments) != 1:
            self._set(*arguments)
        elif name == "/stats":
            print("\n".join(self._stats()) or "(no answer yet)", file=sys.stderr)
        else:
            print(HELP, file=sys.stderr)

    def _set(self, name: str = "", value: str = "") -> None:
        """Change a sampling parameter; raises `RequestError`, and then changes none."""
        given = dict(self._given)
        if value == "default":
            given.pop(name, None)
        elif name:
            given[name] = parse_value(name, value)
        self._params, self._given = self._llm.sampling_params(**given), given
        shown = ", ".join(f"{key} {value}" for key, value in given.items())
        print(f"({shown or 'all as the model recommends'})", file=sys.stderr)

    def _stats(self) -> Iterator[str]:
        for label, some in (("last answer", self._spent[-1:]), ("all answers", self._spent)):
            if some:
                first, *others = (usage for usage, _ in some)
                usage = sum(others, start=first)
                seconds = sum(spent for _, spent in some)
                speed = f"{usage.completion_tokens / seconds:.1f} tokens/s" if seconds else "at once"
                prompt = f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)"
                yield f"{label}: {prompt}, {usage.completion_tokens} generated, {seconds:.2f} s, {speed}"

    def _ask(self, question: str) -> None:
        """Print the answer as it comes. Ctrl-C ends it and keeps what was printed."""
        asked: list[Message] = [*self.messages, {"role": "user", "content": question}]
        pieces: list[str] = []
        shown, usage, began_s = DimmedReasoning() if self._dimmed else None, None, self._clock.now()
        deltas = self._llm.stream(asked, self._reasoning.for_request(self._params))
        try:
            with interrupts_delayed() as interrupted:
                for delta in deltas:
                    if delta.error:
                        raise RequestError(delta.error)
                    pieces.append(delta.text)
                    usage = delta.usage
                    print(shown.push(delta.text) if shown else delta.text, end="", flush=True)
                    if interrupted():
                        print(" (stopped)", end="", file=sys.stderr)
                        break
        finally:
            deltas.close()
            print(shown.finish() if shown else "", flush=True)
        if usage is not None:
            self._spent.append((usage, self._clock.now() - began_s))
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def _read_text(read: Callable[[str], str]) -> str:
    """Read a line, or several.

    A backslash continues a line; lines between two lines of quotes belong together. The end of input ends
    both.
    """
    prompts = ("> ", ". ") if sys.stdin.isatty() else ("", "")  # from a pipe, stdout holds only answers
    lines = [read(prompts[0]).strip()]
    quoted = lines[0].startswith(QUOTES)
    lines[0] = lines[0].removeprefix(QUOTES)
    try:
        while QUOTES not in lines[-1] if quoted else lines[-1].endswith("\\"):
            lines[-1] = lines[-1] if quoted else lines[-1][:-1]
            lines.append(read(prompts[1]))
    except EOFError:
        pass
    if quoted:
        lines[-1] = lines[-1].partition(QUOTES)[0]
    return "\n".join(lines).strip()


class DimmedReasoning:
    """Adds escape sequences that dim the text between <think> and </think>.

    The text comes in pieces. What may be the beginning of a tag is held back until the next piece.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False

    def push(self, text: str) -> str:
        """The part of the text that can be shown now."""
        text, shown = self._held + text, ""
        while True:
            tag = CLOSE if self._inside else OPEN
            before, found, after = text.partition(tag)
            if not found:
                break
            shown += f"{before}{tag}{PLAIN}" if self._inside else f"{before}{DIM}{tag}"
            self._inside = not self._inside
            text = after
        keep = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
        self._held = text[len(text) - keep :]
        return shown + text[: len(text) - keep]

    def finish(self) -> str:
        """The rest of the text. The next `push` begins a new text."""
        rest = self._held + (PLAIN if self._inside else "")
        self._held, self._inside = "", False
        return rest
