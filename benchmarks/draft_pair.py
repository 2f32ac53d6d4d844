"""Speculative decoding with a real pair: the demo model, and its grown target.

    python benchmarks/draft_pair.py --target FOLDER [--batch 1 4] [--temperature 0 0.7] [--out FILE]
        [--llama-cpp LLAMA_SPECULATIVE_SIMPLE --target-gguf FILE --draft-gguf FILE]

`tools/train_draft_target.py` makes the target; the draft is the demo model. Prompts are of the test part of
the demo data, which neither has seen, the same number of each task. Each group of `--batch` prompts is
answered by all methods in turns, and by llama.cpp, one prompt at a time. Time counts from a group's first
tokens on, after some groups that only warm up. With `--repetitive` a model goes on after its answer's end,
and soon repeats itself. `--self-draft '{"layers": 5}' '{"quantization": "int4"}'` adds drafts of the target's
own weights, with these options.

llama.cpp's example program (MIT) decodes one prompt per process; for its speed without a draft it looks up
n-grams that are longer than any text, and finds none. Its time begins behind the prompt, too. Compile
`examples/speculative-simple` with `common_log_flush(common_log_main());` before its end, or the last lines of
its log get lost at times.

Printed for each method: tokens per second, how many times as fast as without, the share of proposed tokens
that were accepted, tokens per step and request, and the share of answers that are equal to those without.
CPU seconds are those of this process, and say more than wall-clock time on a machine with other work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sagellm.benchmarks.reporting import environment
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.append(str(TOOLS))
from demo_data import DIALOGUE_KINDS, MAKERS, Part, dialogue_set, evaluation_set  # noqa: E402
from demo_text import TURN_END, prompt_text  # noqa: E402

DEMO_MODEL = Path(__file__).parent.parent / "src/sagellm/engines/native/demo_model"
METHODS = ("none", "draft_model")
DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
PROPOSED, ACCEPTED = re.compile(r"n_drafted = (\d+)"), re.compile(r"n_accept  = (\d+)")
NO_SUCH_NGRAM = 1000


@dataclass
class Sum:
    """What one method has done. `steps` counts a step once for each request that it moved on."""

    tokens: int = 0
    steps: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    proposed: int = 0
    accepted: int = 0
    answers: list[list[int]] = field(default_factory=list)

    def row(self, plain: Sum) -> dict[str, Any]:
        """Its figures, beside those without proposals."""
        speed = self.tokens / self.wall_s
        row: dict[str, Any] = {"tokens_per_s": round(speed, 1)}
        row["speed_up"] = round(speed / (plain.tokens / plain.wall_s), 3)
        if self.cpu_s:
            row["cpu_speed_up"] = round(self.tokens / self.cpu_s / (plain.tokens / plain.cpu_s), 3)
        if self.steps:
            row["tokens_per_step"] = round(self.tokens / self.steps, 2)
        if self.proposed:
            row["accepted"] = round(self.accepted / self.proposed, 3)
        if self.answers:
            equal = sum(own == other for own, other in zip(self.answers, plain.answers, strict=True))
            row["equal_answers"] = round(equal / len(self.answers), 3)
        return row


def prompts(part: Part, count: int) -> list[str]:
    """So many prompts of each task, and half as many after other turns.

    Tasks alternate.
    """
    of_kind = [evaluation_set(part, kind, count) for kind in MAKERS]
    of_kind += [dialogue_set(part, kind, (count + 1) // 2) for kind in DIALOGUE_KINDS]
    mixed = itertools.chain.from_iterable(itertools.zip_longest(*of_kind))
    return [prompt_text(made) for made in mixed if made is not None]


def parameters(asked: argparse.Namespace, seed: int, temperature: float) -> SamplingParams:
    most = asked.max_tokens
    return SamplingParams(temperature=temperature, max_tokens=most, seed=seed, ignore_eos=asked.repetitive)


def decode(
    engine: Engine, group: Sequence[tuple[int, list[int]]], stop: int, asked: argparse.Namespace,
    temperature: float,
) -> Sum:  # fmt: skip
    """Answers a group of prompts at once. Time counts once all have their first token."""
    for number, ids in group:
        params = parameters(asked, number, temperature)
        engine.add(Request(f"r{number}", Tokens(ids), params, eos_token_ids=frozenset([stop])))
    answers: dict[str, list[int]] = {f"r{number}": [] for number, _ in group}
    before = engine.diagnostics().speculation
    done, began_s, began_cpu_s = Sum(), 0.0, 0.0
    while engine.has_work():
        outputs = engine.step()
        if began_s:
            done.steps += sum(bool(output.new_token_ids) for output in outputs)
            done.tokens += sum(len(output.new_token_ids) for output in outputs)
        for output in outputs:
            answers[output.request_id] += output.new_token_ids
        if not began_s and all(answers.values()):
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
    done.wall_s, done.cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    after = engine.diagnostics().speculation
    done.proposed = sum(after.proposed) - sum(before.proposed)
    done.accepted = sum(after.accepted) - sum(before.accepted)
    done.answers = list(answers.values())
    return done


def llama_cpp(asked: argparse.Namespace, prompt: str, seed: int, temperature: float, options: str) -> Sum:
    """One answer by llama.cpp's example of speculative decoding."""
    command = [str(asked.llama_cpp), "-m", str(asked.target_gguf), "-p", prompt, "-n", str(asked.max_tokens)]
    command += ["--temp", str(temperature), "--seed", str(seed), "--samplers", "temperature", "-c", "2048"]
    command += ["-t", str(asked.threads), "-lv", "4", *options.split()]
    command += ["--ignore-eos"] if asked.repetitive else []
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    text = ran.stdout + ran.stderr
    decoded, proposed, accepted = DECODED.search(text), PROPOSED.search(text), ACCEPTED.search(text)
    if decoded is None or proposed is None or accepted is None:
        raise SystemExit(
            f"{asked.llama_cpp} printed no speed: is it llama-speculative-simple, with a call of "
            f"common_log_flush before it ends?\n{text[-2000:]}"
        )
    return Sum(int(decoded[1]), 0, float(decoded[2]), 0.0, int(proposed[1]), int(accepted[1]))


def add(total: Sum, part: Sum) -> None:
    for name, value in vars(part).items():
        setattr(total, name, getattr(total, name) + value)


def llama_cpp_methods(asked: argparse.Namespace) -> dict[str, str]:
    """Its options by name: without, with its default lengths, and with ours."""
    if asked.llama_cpp is None:
        return {}
    draft = f"--spec-type draft-simple -md {asked.draft_gguf} -td {asked.threads}"
    most = f"--spec-draft-n-max {asked.num_tokens}"
    return {
        "llama.cpp": f"--spec-type ngram-simple --spec-ngram-simple-size-n {NO_SUCH_NGRAM}",
        "llama.cpp, draft": draft,
        f"llama.cpp, draft of {asked.num_tokens}": f"{draft} {most}",
        f"llama.cpp, draft of {asked.num_tokens}, 0.4": f"{draft} {most} --spec-draft-p-min 0.4",
    }


def measured(
    engines: dict[str, Engine], tokenizer: Tokenizer, asked: argparse.Namespace, batch: int,
    temperature: float,
) -> dict[str, Any]:  # fmt: skip
    """Figures of one batch size and temperature."""
    stop = int(tokenizer.token_to_id(TURN_END) or 0)
    peers = llama_cpp_methods(asked) if batch == 1 else {}
    totals = {name: Sum() for name in (*engines, *peers)}
    texts = prompts("validation", 1)[: asked.warm_up * batch]
    num_warm_ups = len(texts)
    texts += prompts("test", asked.prompts)
    for turn, first in enumerate(range(0, len(texts), batch)):
        group = [(first + i, tokenizer.encode(text, add_special_tokens=False).ids)
                 for i, text in enumerate(texts[first : first + batch])]  # fmt: skip
        for name in turned(list(engines), turn):
            done = decode(engines[name], group, stop, asked, temperature)
            if first >= num_warm_ups:
                add(totals[name], done)
        for name in turned(list(peers), turn) if first >= num_warm_ups else ():
            add(totals[name], llama_cpp(asked, texts[first], first, temperature, peers[name]))
    rows = {name: totals[name].row(totals["none"]) for name in engines}
    rows |= {name: totals[name].row(totals["llama.cpp"]) for name in peers}
    return {
        "batch": batch,
        "temperature": temperature,
        "prompts": len(texts) - num_warm_ups,
        "by_method": rows,
    }


def turned(names: list[str], turn: int) -> Iterator[str]:
    """The names, each first in its turn."""
    at = turn % max(1, len(names))
    yield from names[at:] + names[:at]


def engine_of(method: str, asked: argparse.Namespace) -> Engine:
    """An engine with that proposer, behind whose name may be its options in JSON."""
    method, _, given_options = method.partition(" ")
    options: dict[str, Any] = json.loads(given_options or "{}")
    if method == "draft_model":
        options = {"model": str(asked.draft)}
    elif method == "suffix":
        options = {"shared_tokens": 0}  # it meets each prompt at every temperature
    given = {
        "model.name": str(asked.target), "model.dtype": asked.dtype, "kv.num_blocks": 2048,
        "scheduler.max_num_seqs": max(asked.batch), "speculative.method": method,
        "speculative.num_tokens": asked.num_tokens, "speculative.method_options": options,
        "engine.threads": asked.threads, "speculative.adaptive": not asked.constant,
    }  # fmt: skip
    return build_engine(load_config(cli=given, environ={}).config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, default=DEMO_MODEL)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--self-draft", nargs="*", default=[], metavar="JSON", help="options of self_draft")
    parser.add_argument("--constant", action="store_true", help="without the planner of lengths")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--num-tokens", type=int, default=7, help="speculative.num_tokens")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 0.7])
    parser.add_argument("--prompts", type=int, default=4, help="of each task")
    parser.add_argument("--warm-up", type=int, default=6, help="groups")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--repetitive", action="store_true", help="go on after the answer's end")
    parser.add_argument("--llama-cpp", type=Path, help="the program llama-speculative-simple")
    parser.add_argument("--target-gguf", type=Path)
    parser.add_argument("--draft-gguf", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(asked.target / "tokenizer.json"))
    methods = [*asked.methods.split(","), *(f"self_draft {options}" for options in asked.self_draft)]
    engines = {name: engine_of(name, asked) for name in methods}
    settings = {name: str(value) for name, value in vars(asked).items() if not isinstance(value, Path)}
    described = {"environment": asdict(environment()), "settings": settings}
    rows: list[dict[str, Any]] = []
    for batch, temperature in itertools.product(asked.batch, asked.temperature):
        rows.append(measured(engines, tokenizer, asked, batch, temperature))
        print(json.dumps(rows[-1], indent=1), flush=True)
        if asked.out is not None:
            asked.out.write_text(json.dumps({**described, "rows": rows}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
