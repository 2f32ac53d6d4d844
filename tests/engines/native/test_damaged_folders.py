"""A damaged model folder ends in one sentence, whatever is wrong in it: no traceback, no hang, no abort."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sagellm import serving
from sagellm.cli.commands import app
from sagellm.core.config import Config, ModelConfig
from sagellm.core.errors import SageError
from sagellm.engines.build import load
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from sagellm.engines.native.from_config import model_footprint
from sagellm.engines.native.model_fingerprint import model_fingerprint
from tests import quick_commands  # noqa: F401
from tests.effort import examples

Damage = Callable[[Path], object]


def change(file: str, **values: Any) -> Damage:
    """Set keys of a JSON file."""

    def damage(folder: Path) -> None:
        path = folder / file
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(content | values), encoding="utf-8")

    return damage


def write(file: str, data: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(data)


def replace_by(file: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return damage


def header(**tensors: Any) -> Damage:
    raw = json.dumps(tensors).encode()
    return write(SINGLE_FILE, len(raw).to_bytes(8, "little") + raw + bytes(64))


def vocabulary(token_id: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content["model"]["vocab"]["zzz"] = token_id
        path.write_text(json.dumps(content), encoding="utf-8")

    return damage


def template(source: str) -> Damage:
    return write("chat_template.jinja", source.encode())


NEEDED = ("config.json", "tokenizer.json", SINGLE_FILE)
DEEP = b"[" * 100_000 + b"]" * 100_000
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
DAMAGES: dict[str, Damage] = {
    **{
        f"{key} {value!r}": change("config.json", **{key: value})
        for key, value in [
            ("num_hidden_layers", "5"), ("num_hidden_layers", 10**9), ("num_hidden_layers", 10**30),
            ("num_hidden_layers", 2.5), ("num_hidden_layers", True), ("rope_theta", "x"),
            ("rope_theta", -1.0),
            ("rope_theta", float("nan")), ("rope_theta", 1), ("head_dim", "64"), ("head_dim", [64]),
            ("head_dim", 2**40),
            ("architectures", "LlamaForCausalLM"), ("architectures", [3]), ("architectures", {"a": 1}),
            ("eos_token_id", "2"), ("eos_token_id", [None]), ("eos_token_id", 1.5), ("vocab_size", 10**12),
            ("hidden_size", -96), ("hidden_act", ["silu"]), ("torch_dtype", 16), ("rms_norm_eps", "small"),
            ("max_position_embeddings", 10**12), ("rope_scaling", "yarn"),
            ("rope_scaling", ROPE | {"factor": "4"}),
            ("rope_scaling", ROPE | {"factor": 1e300}), ("rope_scaling", ROPE | {"factor": 1e11}),
            ("tie_word_embeddings", "no"), ("layer_types", 3), ("quantization_config", [1]),
            ("quantization_config", {"quant_method": 7}), ("num_key_value_heads", 0),
            ("num_attention_heads", 0),
        ]
    },
    "deep config": write("config.json", b'{"a":' + DEEP + b"}"),
    "binary config": write("config.json", bytes(range(256))),
    "a list as config": write("config.json", b"[1]"),
    "a number of 5000 digits": write("config.json", b'{"vocab_size": ' + b"9" * 5000 + b"}"),
    "empty tokenizer": write("tokenizer.json", b"{}"),
    "binary tokenizer": write("tokenizer.json", bytes(range(256))),
    "deep tokenizer": write("tokenizer.json", DEEP),
    "tokenizer without vocabulary": write("tokenizer.json", b'{"model": {"type": "BPE"}}'),
    **{f"vocabulary id {i!r}": vocabulary(i) for i in (2**31, 2**32 - 1, 10**8, -1, 1.5, "3", None)},
    "added token id": change("tokenizer.json", added_tokens=[{"id": 2**31, "content": "x"}]),
    "added tokens": change("tokenizer.json", added_tokens=["x"]),
    "temperature hot": change("generation_config.json", temperature="hot"),
    "temperature 1e9": change("generation_config.json", do_sample=True, temperature=1e9),
    "top_p -1": change("generation_config.json", do_sample=True, top_p=-1),
    "generation eos": change("generation_config.json", eos_token_id={"a": 1}),
    "deep generation": write("generation_config.json", DEEP),
    "templates": change("tokenizer_config.json", chat_template=["x"]),
    "template number": change("tokenizer_config.json", chat_template=3),
    "template syntax": template("{% for %}"),
    "template binary": write("chat_template.jinja", b"\xff\xfe"),
    "template depth": template("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}"),
    "tokens map": change("special_tokens_map.json", eos_token=[1]),
    "no weights": lambda folder: (folder / SINGLE_FILE).unlink(),
    "float offsets": header(a={"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}),
    "offsets true": header(a={"dtype": "U8", "shape": [1], "data_offsets": [False, True]}),
    "text offsets": header(a={"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}),
    "negative shape": header(a={"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}),
    "shape number": header(a={"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}),
    "dtype list": header(a={"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}),
    "backward offsets": header(a={"dtype": "F8_E4M3", "shape": [1], "data_offsets": [8, 4]}),
    "huge offsets": header(a={"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 10**30]}),
    "deep header": write(SINGLE_FILE, len(DEEP).to_bytes(8, "little") + DEEP),
    "header length": write(SINGLE_FILE, b"\xff" * 64),
    "index outside": change(INDEX_FILE, weight_map={"a": "../other/model.safetensors"}),
    "index root": change(INDEX_FILE, weight_map={"a": "/etc/passwd"}),
    "index NUL": change(INDEX_FILE, weight_map={"a": "x\0y"}),
    "deep index": write(INDEX_FILE, DEEP),
    "index of a folder": change(INDEX_FILE, weight_map={"a": "."}),
    **{f"{name} a folder": replace_by(name, Path.mkdir) for name in NEEDED},
    **{
        f"{name} a link to nothing": replace_by(name, lambda path: path.symlink_to("nowhere"))
        for name in (*NEEDED, "tokenizer_config.json")
    },
    **{
        f"{name} a device": replace_by(name, lambda path: path.symlink_to("/dev/zero"))
        for name in (*NEEDED, "generation_config.json", "chat_template.jinja")
    },
}  # fmt: skip
if hasattr(os, "mkfifo"):
    DAMAGES |= {
        f"{name} a pipe": replace_by(name, os.mkfifo)
        for name in (*NEEDED, "tokenizer_config.json", "chat_template.jinja")
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_command_says_it_in_one_sentence(
    damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "serve", lambda *_, **__: pytest.fail("it was served"))
    DAMAGES[damage](folder)
    options = ["--num-blocks", "8", "--threads", "1", "--set", "engine.kernels=off"]
    for command in (["run", "hi", "-m"], ["serve", "--port", "0"], ["doctor"]):
        result = CliRunner().invoke(app, [*command, str(folder), *options], catch_exceptions=False)
        assert result.exit_code == 2, result.output
        said = result.stderr.strip()
        assert said.startswith("sagellm: "), said
        assert "\n" not in said
        assert "Traceback" not in result.output


@pytest.mark.timeout(60)
def test_a_template_that_does_not_end_is_stopped_at_its_first_request(folder: Path) -> None:
    template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")(folder)
    result = CliRunner().invoke(
        app, ["run", "hi", "-m", str(folder), "--num-blocks", "8"], catch_exceptions=False
    )
    assert result.exit_code == 2
    assert "the chat template was stopped: it takes too many operations" in result.stderr


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """A snapshot has links to files two folders above it."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shutil.copytree(DEMO_MODEL, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (snapshot / SINGLE_FILE).rename(snapshot / "part.safetensors")
    names = Checkpoint(DEMO_MODEL).entries
    (snapshot / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, "part.safetensors")}))
    assert model_fingerprint(snapshot, Checkpoint(snapshot), "") == model_fingerprint(
        DEMO_MODEL, Checkpoint(DEMO_MODEL), ""
    )


NASTY: list[Any] = [
    None,
    True,
    "x",
    "",
    -1,
    0,
    1.5,
    10**30,
    2**31,
    float("inf"),
    [],
    {},
    [[]],
    {"a": 1},
    "\ud800",
    "\0",
]
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON value, but of few in a long list."""
    yield at
    below = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, one in below[:40]:
        yield from places(one, (*at, key))


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = value.copy()
    copy[at[0]] = put(value[at[0]], at[1:], new)
    return copy


@pytest.mark.timeout(600)
@settings(
    max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_other_value_is_refused_or_served(folder: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(FILES))
    whole = (DEMO_MODEL / file).read_bytes()
    if data.draw(st.booleans()):
        content = json.loads(whole)
        at = data.draw(st.sampled_from(list(places(content))))
        broken = json.dumps(put(content, at, data.draw(st.sampled_from(NASTY)))).encode()
    else:
        cut = data.draw(st.integers(0, len(whole)))
        broken = whole[:cut] + data.draw(st.binary(max_size=3)) + whole[cut + data.draw(st.integers(0, 3)) :]
    (folder / file).write_bytes(broken)
    with suppress(SageError):
        serve_once(folder)
    (folder / file).write_bytes(whole)


@pytest.mark.timeout(600)
@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_other_header_is_refused_or_served(folder: Path, data: st.DataObject) -> None:
    whole = (DEMO_MODEL / SINGLE_FILE).read_bytes()
    size = int.from_bytes(whole[:8], "little")
    content = json.loads(whole[8 : 8 + size])
    at = data.draw(st.sampled_from(list(places(content))))
    raw = json.dumps(put(content, at, data.draw(st.sampled_from(NASTY)))).encode()
    (folder / SINGLE_FILE).write_bytes(len(raw).to_bytes(8, "little") + raw + whole[8 + size :])
    with suppress(SageError):
        serve_once(folder)


def serve_once(folder: Path) -> None:
    """Size a model, load it, and answer one chat message."""
    settings = {"engine.kernels": "off", "kv.num_blocks": 16, "engine.threads": 1, "kv.block_size": 16}
    model_footprint(Config(model=ModelConfig(name=str(folder))))
    llm = load(str(folder), settings)
    try:
        llm.chat("17 + 25", llm.sampling_params(max_tokens=2))
    finally:
        llm.close()
