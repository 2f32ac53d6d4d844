"""`sagellm run`: one prompt, the answer streamed to stdout."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import typer

from sagellm.cli._loading import load_llm
from sagellm.cli._options import MODEL, argument, command, flag
from sagellm.cli._reasoning import Reasoning
from sagellm.cli._sampling import Sampling
from sagellm.cli._settings import Settings
from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import RequestError
from sagellm.core.types import FinishReason

if TYPE_CHECKING:
    from sagellm.core.protocols.tokenizer import Message
    from sagellm.engines.llm import LLM, TextDelta

EXIT_INTERRUPTED = 130


@command
def run(
    prompt: str | None = argument("PROMPT", "The prompt; - or nothing: read it from stdin."),
    model: str | None = MODEL,
    system: str | None = flag("TEXT", "System message."),
    *,
    raw: bool = flag("--raw", "Continue the text: no chat template.", False),
    stats: bool = flag("--stats", "Tokens, also cached ones, on stderr.", False),
    sampling: Sampling,
    reasoning: Reasoning,
    settings: Settings,
) -> None:
    """Answer one prompt. The answer, and nothing else, goes to stdout as it is generated.

    With speculative decoding stderr shows what it has gained.
    """
    text = _prompt_text(prompt)
    if raw and system is not None:
        raise RequestError("--raw has no system message: leave out --system", "system")
    last, clock, config = None, MonotonicClock(), settings.load(model=model).config
    with closing(load_llm(config)) as llm:
        messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        began_s = clock.now()
        options = reasoning.for_request(llm.sampling_params(**sampling.given()))
        deltas = llm.stream(text if raw else messages, options)
        with interrupts_delayed() as interrupted:
            for last in deltas:
                if last.error:
                    raise RequestError(last.error)
                print(last.text, end="", flush=True)
                if interrupted():
                    break
            print()
            if interrupted():
                raise typer.Exit(EXIT_INTERRUPTED)
        gain = ""
        if last is not None and config.speculative.method != "none":
            gain = _gain(llm, last.usage.completion_tokens, clock.now() - began_s)
    if last is None:
        return
    if last.finish_reason is FinishReason.LENGTH and "max_tokens" not in sampling.given():
        print("sagellm: the answer was cut off, the context is full", file=sys.stderr)
    if stats:
        print("\n".join(_stats(last)), file=sys.stderr)
    if gain:
        print(gain, file=sys.stderr)


def _gain(llm: LLM, num_tokens: int, seconds: float) -> str:
    """What speculative decoding has done for the answer. A step without it gives one token."""
    counts, num_steps = llm.diagnostics().speculation, llm.stats().num_steps
    proposed, accepted = sum(counts.proposed), sum(counts.accepted)
    share = (
        f"{accepted / proposed:.0%} of {proposed} proposed tokens accepted" if proposed else "no proposals"
    )
    return f"{num_tokens / num_steps:.2f} tokens a step, {share}, {num_tokens / seconds:.1f} tokens/s"


def _stats(last: TextDelta) -> Iterator[str]:
    """Lines on what the answer has cost, by its last delta."""
    usage, leave, steps = last.usage, last.exit, last.drafted
    prompt_tokens = f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)"
    yield f"{prompt_tokens}, {usage.completion_tokens} generated"
    if leave is not None:
        yield f"early exit: {leave.reason}; {leave.num_probe_tokens} probe tokens"
    if steps is not None:
        accepted = f"{steps.num_accepted} of {steps.num_steps} steps of the small model accepted"
        tokens = f"{steps.num_accepted_tokens} of its {steps.num_draft_tokens} tokens"
        yield f"{accepted}, {tokens}; {steps.num_judge_tokens} judge tokens"


def _prompt_text(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise RequestError('no prompt: sagellm run "…", or pipe a text into it', "prompt")
    try:
        text = sys.stdin.read().rstrip("\n")
        text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise RequestError(f"stdin holds no {error.encoding} text: {error.reason}", "prompt") from error
    if not text:
        raise RequestError("stdin is empty: pipe a text into it, or give the prompt as an argument", "prompt")
    return text


@contextmanager
def interrupts_delayed() -> Iterator[Callable[[], bool]]:
    """Delay Ctrl-C to the end of an engine step.

    Yields a function that says whether Ctrl-C was pressed; call it between steps. A second Ctrl-C raises
    `KeyboardInterrupt` at once. Main thread only.
    """
    noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            signal.default_int_handler(number, frame)
        noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
