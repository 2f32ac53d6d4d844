"""Models of a hub, in processes of their own that speak to a fake hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sagellm.engines.native import DEMO_MODEL
from tests import forked_commands
from tests.fake_hub import FakeHub, running_hub

DEMO = {path.name: path.read_bytes() for path in DEMO_MODEL.iterdir() if path.is_file()}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty cache."""
    return tmp_path / "home"


def sagellm(
    hub: FakeHub | None, home: Path, *arguments: str, **more: str
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SAGELLM_", "HF_"))}
    where = {"HF_ENDPOINT": hub.endpoint if hub else "http://127.0.0.1:9", "HF_HOME": str(home)}
    return forked_commands.sagellm(*arguments, environment={**clean, **where, "COLUMNS": "80", **more})


def sharded(tmp_path: Path) -> Mapping[str, bytes]:
    """The demo model in two shards, with other forms of its weights beside them."""
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    files = {name: content for name, content in DEMO.items() if not name.endswith(".safetensors")}
    weight_map: dict[str, str] = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, tmp_path / file)
        files[file] = (tmp_path / file).read_bytes()
        weight_map |= dict.fromkeys(half, file)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    others = ("consolidated.safetensors", "original/consolidated.00.pth", "original/params.json",
              "onnx/model.safetensors", "pytorch_model.bin", "README.md")  # fmt: skip
    return {**files, **dict.fromkeys(others, b"x" * 1000)}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    foreign = DEMO | {"config.json": json.dumps({"architectures": ["MambaForCausalLM"]}).encode()}
    pickled = {name: content for name, content in DEMO.items() if not name.endswith(".safetensors")}
    with running_hub(
        demo=sharded(tmp_path), single=DEMO, foreign=foreign, pickled=pickled | {"pytorch_model.bin": b"x"}
    ) as hub:
        yield hub


def weights(files: list[str]) -> list[str]:
    return sorted(name for name in files if not name.endswith((".json", ".jinja", ".txt")))


def test_an_architecture_that_does_not_run_costs_no_weights(hub: FakeHub, home: Path) -> None:
    done = sagellm(hub, home, "run", "-m", "org/foreign", "hi")
    assert done.returncode == 2
    assert "MambaForCausalLM" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "config.json" in hub.fetched
    assert weights(hub.fetched) == []


def test_of_sharded_weights_the_shards_alone_are_fetched_and_then_nothing(hub: FakeHub, home: Path) -> None:
    done = sagellm(hub, home, "run", "-m", "org/demo", "17 + 25")
    assert done.stdout.endswith("</think>42\n"), done.stderr
    assert weights(hub.fetched) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert not any(name.startswith(("original/", "onnx/")) for name in hub.fetched)

    hub.fetched.clear()
    assert sagellm(hub, home, "pull", "org/demo").returncode == 0
    assert hub.fetched == []

    asked = hub.num_requests
    for options, variables in ((["--offline"], {}), ([], {"HF_HUB_OFFLINE": "1"})):
        again = sagellm(hub, home, "run", "-m", "org/demo", *options, "17 + 25", **variables)
        assert again.stdout == done.stdout, again.stderr
    assert hub.num_requests == asked
    assert sagellm(None, home, "run", "-m", "org/demo", "17 + 25").stdout == done.stdout


def test_pull_then_models_and_doctor(hub: FakeHub, home: Path) -> None:
    pulled = sagellm(hub, home, "pull", "org/single")
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.startswith("org/single: 2.2 MB in ")
    assert weights(hub.fetched) == ["model.safetensors"]
    sagellm(hub, home, "pull", "org/foreign")
    listed = sagellm(None, home, "models").stdout.splitlines()
    assert [line.split()[:3] for line in listed if line.startswith(("org/single", "sagellm-demo"))] == [
        ["sagellm-demo", "2.7", "MB"], ["org/single", "2.2", "MB"]
    ]  # fmt: skip
    [foreign] = [line for line in listed if line.startswith("org/foreign")]
    assert "no:" in foreign
    sized = sagellm(None, home, "doctor", "-m", "org/single", "--port", "0")
    assert "org/single: 1.1 M parameters" in sized.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "-m", "org/none", "hi"), "'org/none' is no folder here"),
        (
            ("run", "-m", "org/demo", "--offline", "hi"),
            "is not in the local cache. Without --offline, `sagellm pull org/demo`",
        ),
        (("run", "-m", "org/pickled", "hi"), "the weights have to be safetensors files"),
        (("pull",), "which model? sagellm pull ORG/NAME"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(
    hub: FakeHub, home: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = sagellm(hub, home, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert weights(hub.fetched) == []


def test_a_folder_that_holds_no_model_says_so(home: Path, tmp_path: Path) -> None:
    done = sagellm(None, home, "run", "-m", str(tmp_path), "hi")
    assert done.returncode == 2
    assert "it has no config.json" in done.stderr
