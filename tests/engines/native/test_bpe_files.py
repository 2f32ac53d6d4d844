"""vocab.json and merges.txt, as OPT has them, beside transformers' own reading of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from typer.testing import CliRunner

from sagellm.cli.commands import app
from sagellm.core.errors import ModelError
from sagellm.engines.native.tokenizer import Tokenizer
from sagellm.engines.native.tokenizer_files import MERGES_FILE, VOCAB_FILE
from tests import quick_commands  # noqa: F401
from tests.effort import examples
from tests.tiny_models import VOCAB, save_tiny
from tests.toy_tokenizers import byte_level

END: dict[str, Any] = {
    "content": "</s>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
}
END["__type"] = "AddedToken"
OPT = {
    "errors": "replace", "unk_token": END, "bos_token": END, "eos_token": END, "pad_token": "<pad>",
    "add_prefix_space": False, "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer",
}  # fmt: skip
THINK = {
    "content": "<think>",
    "lstrip": True,
    "rstrip": True,
    "single_word": False,
    "normalized": False,
    "special": False,
}
NAMES = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
WORDS = ["the", " ", "fox ", "</s>", "<s>", "<pad>", "<think>", "<|new|>", "<|im_end|>", "é🙂", "\n"]
CASES: dict[str, dict[str, Any]] = {
    "opt": {"tokenizer_config.json": OPT},
    "names in the map": {
        "tokenizer_config.json": {"add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"},
        "special_tokens_map.json": NAMES,
    },
    "no first token": {"tokenizer_config.json": OPT | {"add_bos_token": False}},
    "space in front": {"tokenizer_config.json": OPT | {"add_prefix_space": True}},
    "new tokens": {
        "tokenizer_config.json": OPT
        | {"additional_special_tokens": ["<|im_end|>", "<|new|>"], "added_tokens_decoder": {"343": THINK}}
    },
}  # fmt: skip


def folder_of(path: Path, case: str) -> Path:
    """The tokenizer of `byte_level` in two files, and the files that `case` adds."""
    path.mkdir()
    byte_level().model.save(str(path))
    vocab = json.loads((path / VOCAB_FILE).read_text(encoding="utf-8"))
    vocab |= {"<pad>": len(vocab), "<unk>": len(vocab) + 1}
    files = {VOCAB_FILE: vocab, "config.json": {"model_type": "opt", "architectures": ["OPTForCausalLM"]}}
    for name, content in (files | CASES[case]).items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=CASES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    folder = folder_of(tmp_path_factory.mktemp("bpe") / "model", request.param)
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)


@settings(max_examples=examples(150), deadline=None)
@given(
    text=st.text(max_size=30)
    | st.lists(st.sampled_from(WORDS)).map("".join)
)  # fmt: skip
def test_ids_and_texts_are_those_of_transformers(both: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = both
    for special in (True, False):
        ids = theirs(text, add_special_tokens=special)["input_ids"]
        assert list(ours.encode(text, add_special_tokens=special)) == ids
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert ours.eos_token_ids == {theirs.eos_token_id}


def test_every_prompt_of_opt_begins_with_its_end_token(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    ids = list(ours.encode("fox"))
    assert (ids[0] == theirs.bos_token_id) == bool(theirs.add_bos_token)


def test_an_opt_model_with_these_files_runs(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "opt")
    vocab = json.loads((folder / VOCAB_FILE).read_text(encoding="utf-8"))
    save_tiny(tmp_path / "opt", "opt")
    merges = (folder / MERGES_FILE).read_text(encoding="utf-8").splitlines()
    few = {token: token_id for token, token_id in vocab.items() if token_id < VOCAB}
    kept = [line for line in merges[1:] if {*line.split(" "), line.replace(" ", "")} <= few.keys()]
    (tmp_path / "opt" / VOCAB_FILE).write_text(json.dumps(few), encoding="utf-8")
    (tmp_path / "opt" / MERGES_FILE).write_text("\n".join([merges[0], *kept]), encoding="utf-8")
    config = {**OPT, "pad_token": None}
    (tmp_path / "opt" / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    options = ["--num-blocks", "8", "--max-tokens", "3", "--temperature", "0", "--set", "engine.kernels=off"]
    done = CliRunner().invoke(app, ["run", "a fox", "--raw", "-m", str(tmp_path / "opt"), *options])
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        (VOCAB_FILE, "[]", "must hold a JSON object"),
        (VOCAB_FILE, '{"a": -1}', "the id -1"),
        (VOCAB_FILE, '{"a": 1}', "are no tokenizer"),
        (MERGES_FILE, "#version: 0.2\na b c\n", "line 2: 'a b c' is not two tokens"),
        (MERGES_FILE, "zz yy\n", "are no tokenizer"),
        ("added_tokens.json", '{"<x>": 99999999}', "the id 99999999"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "'x' in added_tokens_decoder"),
        ("tokenizer_config.json", '{"add_bos_token": "yes"}', "add_bos_token is 'yes'"),
        ("tokenizer_config.json", '{"bos_token": ""}', "bos_token"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path: Path, file: str, text: str, words: str) -> None:
    folder = folder_of(tmp_path / "model", "opt")
    (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=words):
        Tokenizer.from_folder(folder)


def test_pickled_weights_are_refused_with_how_to_convert_them(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "opt")
    save_tiny(tmp_path / "opt", "opt")
    shutil.copy(tmp_path / "opt" / "config.json", folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    refused = CliRunner().invoke(app, ["run", "x", "-m", str(folder)])
    assert refused.exit_code == 2
    assert "pickled weights (pytorch_model.bin) are never loaded" in refused.stderr
    assert f"from_pretrained({str(folder)!r}).save_pretrained(" in refused.stderr
