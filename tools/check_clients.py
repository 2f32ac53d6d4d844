"""Runs third-party clients against the server with the demo model. Each has its own environment.

    python tools/check_clients.py [--environments FOLDER] [NAME ...]

NAME is openai, langchain-openai, litellm, lm-eval or schemathesis; all by default. Environments are made in
FOLDER (build/clients) when they are missing, which needs a package index. Prints versions and results; the
exit code is 0 if every client got what it wants.

lm-eval runs a multiple-choice task of sums by log-likelihood, whose every value is then compared with
transformers. schemathesis tests every operation of /openapi.json with data that fits the schemas and data
that does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import free_port, running_server

ROOT = Path(__file__).parents[1]
CLIENTS = Path(__file__).parent / "clients"
ENVIRONMENTS = ROOT / "build" / "clients"
TIMEOUT_S = 900
MODEL, KEY, ADMIN_KEY = "demo", "a key", "an admin key"
NUM_SUMS = 100
FEWEST_RIGHT = 0.9
LOGLIKELIHOOD_TOLERANCE = 0.01


class ClientError(Exception):
    """A client did not get what it wants; the message is its last words."""


@dataclass(frozen=True)
class Client:
    """What is installed, and the command to run. It gets the server's url and the environment's folder, and
    returns a line of text. Raises `ClientError`."""

    packages: Sequence[str]
    run: Callable[[str, Path], str]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Clients of other people against the server.")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(KNOWN)}")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - KNOWN.keys():
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(KNOWN)}")
    failed = [name for name in given.names or KNOWN if not _report(name, given.environments)]
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


def _report(name: str, environments: Path) -> bool:
    began_s = time.monotonic()
    try:
        line = check(name, environments)
    except ClientError as error:
        print(f"{name}: FAILED\n{error}")
        return False
    print(f"{line} ({time.monotonic() - began_s:.0f} s)")
    return True


def check(name: str, environments: Path) -> str:
    """Runs one client against a new server. Returns a line with versions and results."""
    client = KNOWN[name]
    folder = environments.absolute() / name
    _install(folder, client.packages)
    options = ["--api-key", KEY, "--served-name", MODEL, "--set", f"server.admin_key={ADMIN_KEY}"]
    with (
        tempfile.TemporaryFile("w+") as log,
        running_server(free_port(), log.fileno(), *options) as url,
    ):
        found = client.run(url, folder)
    return f"{_versions(folder, client.packages)}: {found}"


def _install(folder: Path, packages: Sequence[str]) -> None:
    marker = folder / "installed.txt"
    if marker.is_file() and marker.read_text() == "\n".join(packages):
        return
    shutil.rmtree(folder, ignore_errors=True)
    _call([sys.executable, "-m", "venv", str(folder)], folder.parent)
    _call([_program(folder, "pip"), "install", "--quiet", *packages], folder)
    marker.write_text("\n".join(packages))


def _versions(folder: Path, packages: Sequence[str]) -> str:
    names = [package.split("[")[0].split(">")[0].split("=")[0] for package in packages]
    code = (
        "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
    )
    return _call([_program(folder, "python"), "-c", code, *names], folder).strip()


def _program(folder: Path, name: str) -> str:
    return str(folder / "bin" / name)


def _call(command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Its stdout. Raises `ClientError` with the last lines if it fails."""
    cwd.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ClientError(str(error)) from error
    if done.returncode:
        raise ClientError("\n".join((done.stdout + done.stderr).splitlines()[-60:]))
    return done.stdout


def _script(name: str) -> Callable[[str, Path], str]:
    """A client whose script asserts what it wants."""

    def run(url: str, folder: Path) -> str:
        _call([_program(folder, "python"), str(CLIENTS / f"{name}.py"), f"{url}/v1", MODEL, KEY], folder)
        return "passed"

    return run


# -- lm-evaluation-harness


def sums(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Questions with four choices each, the right one anywhere among them."""
    draw = random.Random(seed)
    found: list[dict[str, object]] = []
    for _ in range(count):
        a, b = draw.randrange(10, 90), draw.randrange(10, 90)
        wrong = draw.sample([shift for shift in range(-20, 21) if shift], 3)
        choices = [f"{_steps(a, b)}{a + b + shift}" for shift in (0, *wrong)]
        draw.shuffle(choices)
        found.append({"a": a, "b": b, "choices": choices, "label": choices.index(f"{_steps(a, b)}{a + b}")})
    return found


def _steps(a: int, b: int) -> str:
    """The demo model writes its steps before the sum."""
    carry = (a % 10 + b % 10) // 10
    units, tens = f"{a % 10}+{b % 10}={a % 10 + b % 10}", f"{a // 10}+{b // 10}"
    tens += f"+1={a // 10 + b // 10 + 1}" if carry else f"={a // 10 + b // 10}"
    return f"<think>{a}+{b}: {units} {tens}</think>"


def _lm_eval(url: str, folder: Path) -> str:
    from sagellm.engines.native import DEMO_MODEL

    work = folder / "sums"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    shutil.copy(CLIENTS / "sums.yaml", work)
    (work / "sums.json").write_text("\n".join(map(json.dumps, sums(NUM_SUMS))))
    options = {
        "base_url": f"{url}/v1/completions",
        "model": MODEL,
        "tokenizer_backend": "huggingface",
        "tokenizer": str(DEMO_MODEL),
        "num_concurrent": "4",
        "max_retries": "1",
    }
    _call(
        [
            _program(folder, "lm_eval"), "run", "--model", "local-completions", "--tasks", "sums",
            "--model_args", ",".join(f"{key}={value}" for key, value in options.items()),
            "--include_path", str(work), "--output_path", str(work), "--log_samples", "--batch_size", "4",
        ],
        work,
        {
            "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"),
            "PATH": "/usr/bin:/bin",
        },
    )  # fmt: skip
    [results] = work.rglob("results_*.json")
    [samples] = work.rglob("samples_sums_*.jsonl")
    accuracy = float(json.loads(results.read_text())["results"]["sums"]["acc,none"])
    error = _largest_error([json.loads(line) for line in samples.read_text().splitlines()])
    if accuracy < FEWEST_RIGHT or error > LOGLIKELIHOOD_TOLERANCE:
        raise ClientError(f"accuracy {accuracy}, log-likelihoods within {error} of transformers")
    return f"{NUM_SUMS} sums, accuracy {accuracy:.2f}, log-likelihoods within {error:.0e} of transformers"


def _largest_error(samples: Sequence[Mapping[str, Any]]) -> float:
    """Between what lm-eval got from the server for each choice and what transformers computes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sagellm.engines.native import DEMO_MODEL

    tokenizer = AutoTokenizer.from_pretrained(str(DEMO_MODEL))
    network = AutoModelForCausalLM.from_pretrained(str(DEMO_MODEL), dtype=torch.float32)
    largest = 0.0
    for sample in samples:
        for pair, response in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            context, choice = pair["arg_0"], pair["arg_1"]
            start = len(tokenizer(context.rstrip())["input_ids"])  # its spaces count as the choice's
            ids = torch.tensor([tokenizer(context + choice)["input_ids"]])
            with torch.inference_mode():
                logprobs = network(ids).logits[0, :-1].log_softmax(-1)
            own = logprobs.gather(1, ids[0, 1:, None])[start - 1 :].sum()
            largest = max(largest, abs(float(own) - float(response[0])))
    return largest


# -- schemathesis


def _schemathesis(url: str, folder: Path) -> str:
    """With the keys, so that it is tested too that nothing is answered without."""
    command = [_program(folder, "schemathesis"), "--config-file", str(CLIENTS / "schemathesis.toml")]
    command += ["run", f"{url}/openapi.json"]
    given = {
        "SCHEMATHESIS_HOOKS": str(CLIENTS / "schemathesis_checks.py"),
        "KEY": KEY,
        "ADMIN_KEY": ADMIN_KEY,
    }
    lines = _call(command, folder, os.environ | given).splitlines()
    [cases] = [line for line in lines if " generated, " in line]
    return cases.strip()


KNOWN: dict[str, Client] = {
    "openai": Client(["openai>=2"], _script("openai_client")),
    "langchain-openai": Client(["langchain-openai>=1.7"], _script("langchain_client")),
    "litellm": Client(["litellm>=1.100"], _script("litellm_client")),
    "lm-eval": Client(["lm_eval[api]>=0.4.13", "transformers>=5,<6"], _lm_eval),
    "schemathesis": Client(["schemathesis>=4.32,<5"], _schemathesis),
}


if __name__ == "__main__":
    main()
