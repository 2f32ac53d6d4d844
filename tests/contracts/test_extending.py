"""Every complete file of docs/extending.md works as it says there, in the user's working directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sagellm.core.errors import SageError
from sagellm.core.registry import KINDS
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.simulator import TokenMemoryBackend

REPOSITORY = Path(__file__).parents[2]
NAME = "my_policy:Mine"
DOCUMENT = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- tested: (\w+\.py) -->\n```python\n(.*?)```", DOCUMENT, re.DOTALL))
SCRIPT = """
import sys
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config

engine = build_engine(load_config(sys.argv[1], environ={}).config)
params = SamplingParams(temperature=0.0, max_tokens=6)
for number in range(4):
    engine.add(Request(f"r{number}", Tokens(list(range(1, 90 + number))), params))
tokens = 0
while engine.has_work():
    tokens += sum(len(output.new_token_ids) for output in engine.step())
    engine.check()
print(tokens, engine.stats().reuse.num_hit_tokens)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory that holds the files of the document, and nothing else."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str, **environment: str) -> str:
    """Output of a command in the folder, which is not on the path of modules; fails where it fails."""
    paths = os.pathsep.join(str(REPOSITORY / one) for one in ("src", "tools", "."))
    done = subprocess.run(
        [sys.executable, "-P", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_passes_the_contract_tests(folder: Path) -> None:
    tests = str(REPOSITORY / "tests" / "contracts" / "test_eviction.py")
    shown = run(
        folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", "my_policy", tests,
        SAGELLM_POLICIES=NAME,
    )  # fmt: skip
    assert re.search(r"\b2 passed", shown), shown


def test_replay_takes_it_from_the_working_directory(folder: Path) -> None:
    trace = str(REPOSITORY / "tests" / "golden" / "traces" / "chat.jsonl")
    shown = run(
        folder, "-m", "sagellm", "replay", trace, "--policy", "lru", "--policy", NAME, "--capacity", "10%",
        "--jobs", "2",
    )  # fmt: skip
    lines = {line.split()[0]: line.split()[3] for line in shown.splitlines() if "10%" in line}
    assert abs(float(lines[NAME]) - float(lines["lru"])) < 1.0, shown


def test_a_model_runs_with_it(folder: Path) -> None:
    pytest.importorskip("torch")
    run(folder, "-m", "sagellm", "run", "--set", f"kv.eviction={NAME}", "--max-tokens", "2", "Hello")


def test_a_module_that_is_nowhere_is_named(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sagellm", "run", "--set", "kv.eviction=no_such_module:Mine", "Hello"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode
    assert "there is no module 'no_such_module'" in done.stderr
    assert "Traceback" not in done.stderr


def engine_with(folder: Path, settings: str) -> tuple[int, int]:
    """Generated and reused tokens of four requests on an engine with these settings (YAML)."""
    (folder / "settings.yaml").write_text(settings, encoding="utf-8")
    tokens, reused = run(folder, "-c", SCRIPT, "settings.yaml").split()
    return int(tokens), int(reused)


def test_every_kind_that_something_uses_has_a_file() -> None:
    kinds = {*KINDS} - {"collectives"}
    assert {name.removesuffix(".py").removeprefix("my_") for name in FILES} == {
        {"predictor": "lengths", "reuse_predictor": "reuse", "weight_format": "format",
         "trace_format": "trace"}.get(kind, kind) for kind in kinds
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["my_backend:Mine", "simulator"])
def test_backends_come_from_the_registry(folder: Path, backend: str) -> None:
    tokens, _ = engine_with(folder, f"engine: {{backend: '{backend}'}}")
    assert tokens == 4 * 6


def test_passes_predictors_index_and_pool_of_the_document(folder: Path) -> None:
    kv = "eviction: predictive, eviction_options: {predictor: 'my_reuse:Mine'}, num_blocks: 40"
    tokens, reused = engine_with(
        folder,
        f"""
kv: {{{kv}, index: 'my_index:Mine', pool: 'my_pool:Mine'}}
engine: {{backend: 'my_backend:Mine'}}
scheduler:
  max_num_seqs: 2
  passes: [prefix_cache_aware, 'my_pass:Mine', lifetime_aware, chunked_prefill, memory_aware_preemption]
  pass_options: {{lifetime_aware: {{predictor: {{name: 'my_lengths:Mine', first_guess: 64.0}}}}}}
""",
    )
    assert tokens == 4 * 6
    assert reused >= 64


def test_a_proposer_changes_no_token(folder: Path) -> None:
    pytest.importorskip("torch")
    mine = engine_with(folder, "speculative: {method: 'my_proposer:Mine', method_options: {period: 3}}")
    assert mine == engine_with(folder, "speculative: {method: none}")


def test_a_trace_format_reads_a_file(folder: Path) -> None:
    (folder / "mine.csv").write_text("0.5,100,20\n1.5,50,10\n", encoding="utf-8")
    shown = run(folder, "-m", "sagellm", "trace", "info", "mine.csv", "--format", "my_trace:Mine")
    assert "2" in shown
    assert "150" in shown or "75" in shown, shown


def test_a_weight_format_gives_the_values(folder: Path) -> None:
    script = (
        "import torch; from my_format import Mine; "
        "codes = torch.tensor([[-2, 3], [4, -5]], dtype=torch.int8); "
        "matrix = Mine({'bits': 8}).matrix({'codes': codes, 'scale': torch.tensor([0.5, 2.0])}, 2, 2); "
        "print(matrix.values().tolist())"
    )
    assert "[[-1.0, 1.5], [8.0, -10.0]]" in run(
        folder, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {script}"
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("engine: {backend: nativ}", "unknown backend 'nativ'"),
        (
            "engine: {backend: simulator, backend_options: {block_size: 8}}",
            "block_size is given by the engine",
        ),
        ("engine: {backend: simulator, backend_options: {clock: 1}}", "clock is given by the engine"),
        ("engine: {backend: simulator, backend_options: {hardware: h200x}}", "h200"),
        (
            "kv: {eviction: predictive, eviction_options: {predictor: tabel}}",
            "unknown reuse_predictor 'tabel'",
        ),
        ("kv: {eviction: predictive, eviction_options: {predictor: {horizon_s: 1}}}", "give a name"),
        (
            "{engine: {backend: simulator}, speculative: {method: prompt_lookup}}",
            "needs a backend and a model that compute proposed tokens",
        ),
    ],
)
def test_wrong_names_and_options_are_explained(tmp_path: Path, settings: str, expected: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(settings, encoding="utf-8")
    config = load_config(path, environ={}).config
    config = config.model_copy(update={"kv": config.kv.model_copy(update={"num_blocks": 40})})
    with pytest.raises(SageError, match=re.escape(expected)):
        build_engine(config, None if "backend" in settings else TokenMemoryBackend(40, 16))


def test_a_chip_says_what_it_needs(folder: Path) -> None:
    script = "from sagellm.core.registry import registry\nprint(registry('interconnect')"
    script += ".create('my_interconnect:Mine', root='.').is_available())"
    assert "no device: no file is named dev/xyz" in run(folder, "-c", script)
    (folder / "dev").mkdir()
    (folder / "dev" / "xyz0").touch()
    assert "torch_xyz is not installed; XYZ provides it" in run(folder, "-c", script)


def test_a_router_of_the_document_places_requests(folder: Path) -> None:
    script = """
from sagellm.control_plane.router import make_router
from sagellm.core.protocols.router import ExecutionInstance, RequestMetadata
from sagellm.core.types import Tokens

fleet = [ExecutionInstance(name, num_free_blocks=number, block_size=16) for number, name in enumerate("abc")]
print(make_router("my_router:Mine").place(RequestMetadata("r", Tokens([1])), fleet, []).prefill)
"""
    assert run(folder, "-c", script).strip() == "c"
