"""`sagellm chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from sagellm.cli._interrupt import interrupts_noted
from sagellm.cli._loading import load_llm
from sagellm.cli._options import Model, command
from sagellm.cli._sampling import Sampling
from sagellm.cli._settings import Settings
from sagellm.core.errors import RequestError

if TYPE_CHECKING:
    from sagellm.core.protocols.tokenizer import Message
    from sagellm.core.types import SamplingParams
    from sagellm.engines.llm import LLM

HELP = "/reset  forget the conversation    /exit  leave    Ctrl-C  stop the answer    Ctrl-D  leave"


@command
def chat(
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    *,
    model: Model,
    sampling: Sampling,
    settings: Settings,
) -> None:
    """Talk to a model. /reset forgets, /exit leaves, Ctrl-C stops an answer and not the program."""
    llm = load_llm(settings.load(model=model.name).config)
    try:
        _import_line_editing()
        print(f"{llm.model_name}   {HELP}", file=sys.stderr)
        Conversation(llm, llm.sampling_params(**sampling.given), system).talk(input)
    finally:
        llm.close()


class Conversation:
    """Messages so far. A turn adds a question and its answer, or, when the question fails, nothing."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._opening)

    def talk(self, read: Callable[[str], str]) -> None:
        """Turns until `/exit` or the end of input."""
        while True:
            try:
                line = read("> ").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n(/exit leaves)", file=sys.stderr)
                continue
            except UnicodeDecodeError as error:
                print(f"(that is no {error.encoding} text: {error.reason})", file=sys.stderr)
                continue
            if line == "/exit":
                return
            self.turn(line)

    def turn(self, line: str) -> None:
        """A command or a question."""
        if line == "/reset":
            self.messages = list(self._opening)
            print("(forgotten)", file=sys.stderr)
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line:
            self._ask(line)

    def _ask(self, question: str) -> None:
        asked: list[Message] = [*self.messages, {"role": "user", "content": question}]
        try:
            answer = self._answer(asked)
        except RequestError as error:
            print(f"{error}  (/reset starts anew)", file=sys.stderr)
            return
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _answer(self, messages: list[Message]) -> str:
        """Print the answer as it comes; Ctrl-C ends it where it is, and what was said stays said."""
        pieces: list[str] = []
        deltas = self._llm.stream(messages, self._params)
        try:
            with interrupts_noted() as interrupted:
                for delta in deltas:
                    if delta.error:
                        raise RequestError(delta.error)
                    pieces.append(delta.text)
                    print(delta.text, end="", flush=True)
                    if interrupted():
                        print(" (stopped)", end="", file=sys.stderr)
                        break
        finally:
            deltas.close()
            print(flush=True)
        return "".join(pieces)


def _import_line_editing() -> None:
    """Arrow keys and history in `input`, where Python has them."""
    try:
        import readline
    except ImportError:  # a Python without readline edits lines as the terminal does
        return
    readline.set_history_length(1000)
