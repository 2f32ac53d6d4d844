"""Peers: the same sections measured in another engine's own environment, by a script that knows it.

The script is called as `PYTHON SCRIPT NAME OUT.json --sections LETTERS [--quick]` and writes
`{"version": ..., "rows": [{"section", "case", "size", "p50", "cpu50"?, "impl"?}, ...]}`: times in µs of one
call at a time (`cpu50` is the median CPU time of the thread), memory in bytes per block (`p50`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.benchmarks.micro._case import Row
from sagellm.benchmarks.micro._comparable import PEERS, comparables
from sagellm.core.errors import ConfigError, SageError, nearest

SCRIPT_VARIABLE = "SAGELLM_PEER_SCRIPT"
ENVIRONMENTS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("sglang", "f"): {"BENCH_IMPL": "Unified:rust"},
}
"""Variables for one section of one peer: trees that share a process would share its freed memory too."""

MODEL = "tiny_llama"
"""The model folder that the script looks for where it runs: a scheduler wants to know a model's sizes."""
_MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_position_embeddings": 200_000,
    "torch_dtype": "bfloat16",
}
_SHOWN_LINES = 5


class PeerError(SageError):
    """A peer's measurement failed; the message ends with the last lines that it wrote."""


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One row of a peer, its median in µs of CPU time or in bytes per block."""

    peer: str
    section: str
    case: str
    size: int
    value: float
    turn: int


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine in an environment of its own, and the script that measures it there."""

    name: str
    python: str
    script: Path

    def measure(self, section: str, *, quick: bool, turn: int = 0) -> list[PeerRow]:
        """The rows of one section; raises `PeerError` if there are none to be had."""
        with tempfile.TemporaryDirectory(prefix="sagellm-peer-") as folder:
            out = Path(folder, "out.json")
            _write_model(Path(folder, MODEL))
            command = [self.python, str(self.script.resolve()), self.name, str(out), "--sections", section]
            done = subprocess.run(
                command + ["--quick"] * quick,
                cwd=folder,
                env={**ENVIRONMENTS.get((self.name, section), {}), **os.environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
            if done.returncode:
                raise PeerError(
                    f"{self._what(section)} exit status {done.returncode}: {_last_lines(done.stdout)}"
                )
            return self._read(out, section, turn, done.stdout)

    def _read(self, out: Path, section: str, turn: int, said: str) -> list[PeerRow]:
        try:
            found = json.loads(out.read_text(encoding="utf-8"))
            label = f"{self.name} {found.get('version', '')}".strip()
            rows = [_peer_row(label, row, turn) for row in found["rows"] if row["section"] == section]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise PeerError(f"{self._what(section)} wrote no rows ({what}): {_last_lines(said)}") from error
        if not rows:
            raise PeerError(f"{self._what(section)} measured nothing: {_last_lines(said)}")
        return rows

    def _what(self, section: str) -> str:
        return f"peer {self.name}, section {section} of {self.script.name},"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One of our figures, the mean of the runs before and after the peer's, over the peer's.

    Times are those of one call at a time, on both sides. `ours` names the rows that were added up; `drift` is
    how far our two runs lie apart, as a share of their mean: a ratio closer to 1 than that says nothing.
    """

    section: str
    size: int
    variant: str
    ours: tuple[str, ...]
    value: float
    drift: float
    peer: str
    case: str
    peer_value: float
    ratio: float | None


def parse_peers(given: Sequence[str], script: Path | None) -> list[Peer]:
    """`NAME=PYTHON` for each peer; raises `ConfigError` for what could not be run, before anything is."""
    if not given:
        return []
    if script is None:
        raise ConfigError(
            f"--peer needs the script that measures it: --peer-script FILE, or {SCRIPT_VARIABLE}"
        )
    if not script.is_file():
        raise ConfigError(f"there is no peer script {script}")
    return [_parse_peer(one, script) for one in given]


def compare(rows: Iterable[Row], peer_rows: Iterable[PeerRow]) -> list[Comparison]:
    """Every row of a peer beside each of our implementations that was measured at the same size."""
    ours = {(row.case, row.size, row.variant, row.turn): _as_harness(row) for row in rows}
    variants = list(dict.fromkeys(key[2] for key in ours))
    return [one for row in peer_rows for variant in variants for one in _compare_row(ours, variant, row)]


def _compare_row(
    ours: Mapping[tuple[str, int, str, int], float], variant: str, peer: PeerRow
) -> Iterator[Comparison]:
    for one in comparables(peer.peer.partition(" ")[0], peer.section, peer.case):
        turns = [
            [ours.get((case, peer.size, variant, turn)) for case in one.ours]
            for turn in (peer.turn, peer.turn + 1)
        ]
        sums = [sum(value for value in turn if value is not None) for turn in turns if None not in turn]
        if not sums:
            continue
        mean = sum(sums) / len(sums)
        yield Comparison(
            section=peer.section,
            size=peer.size,
            variant=variant,
            ours=one.ours,
            value=round(mean, 3),
            drift=round((max(sums) - min(sums)) / mean, 3) if mean else 0.0,
            peer=peer.peer,
            case=peer.case,
            peer_value=peer.value,
            ratio=round(mean / peer.value, 4) if peer.value else None,
        )


def _as_harness(row: Row) -> float:
    return row.value if row.timing is None else row.timing.single


def _parse_peer(text: str, script: Path) -> Peer:
    name, equals, python = text.partition("=")
    if not equals or not python:
        raise ConfigError(f"--peer {text!r}: write NAME=PYTHON, for example vllm=venv/bin/python")
    if name not in PEERS:
        raise ConfigError(f"--peer {text!r}: unknown peer {name!r}.{nearest(name, PEERS)}")
    found = shutil.which(Path(python).expanduser())
    if found is None:
        raise ConfigError(f"--peer {text!r}: there is no interpreter {python}")
    return Peer(name, os.path.abspath(found), script)  # noqa: PTH100 - a link to follow would leave the venv


def _write_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_MODEL_CONFIG), encoding="utf-8")


def _peer_row(label: str, row: Mapping[str, Any], turn: int) -> PeerRow:
    """`impl` names one of several implementations of the same peer."""
    impl = f" {row['impl']}" if row.get("impl") else ""
    value = float(row.get("cpu50", row["p50"]))
    return PeerRow(label + impl, row["section"], row["case"], int(row["size"]), value, turn)


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_SHOWN_LINES:]) or "it wrote nothing"
