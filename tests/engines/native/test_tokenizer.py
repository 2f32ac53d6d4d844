"""The tokenizer against transformers, and the incremental detokenizer against decoding all at once."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import Split

from sagellm.core.errors import ModelError, RequestError, UnsupportedParameterError
from sagellm.engines.native.tokenizer import Tokenizer
from tests.toy_tokenizers import CHATML, MAKERS, byte_level, word_level

TEXTS = ["hello world", "  two  spaces ", "naïve 你好 🙂🙃", "line\nline", "<think>1+1=2</think> 2", "", "a"]
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{% if loop.index0 == 3 %}{% break %}{% endif %}[{{ m.role }}] {{ m.content }} {{ {'ü': 1} | tojson }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
)
MESSAGES = [
    {"role": "system", "content": " You are helpful. "},
    {"role": "user", "content": "What is 1 + 1? 你好"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Why?"},
]


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer(MAKERS[name](), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def folder_with(tmp_path: Path, fast: FastTokenizer, **files: Any) -> Path:
    """A model folder; `files` are JSON contents by name without suffix."""
    fast.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    contents = {"tokenizer_config": {}, **files}
    contents["tokenizer_config"] = config | contents["tokenizer_config"]
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


# -- incremental detokenizer


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_deltas_join_to_decode(name: str, skip_special_tokens: bool, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    whole = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    stream = tokenizer.stream(skip_special_tokens=skip_special_tokens)
    sent = ""
    for token_id in ids:
        sent += stream.push(token_id)
        assert whole.startswith(sent)
    assert sent + stream.finish() == whole


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_character_is_sent_when_whole(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode("hi 🙂🙃é你.", add_special_tokens=False)
    stream = tokenizer.stream()
    deltas = [stream.push(token_id) for token_id in ids] + [stream.finish()]
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "".join(deltas[:3]), "plain text is not held back"


@pytest.mark.parametrize("name", MAKERS)
def test_cost_per_token_does_not_grow(name: str) -> None:
    """Decoded ids are counted: at most a few per token, however long the text."""
    fast = CountingDecoder(MAKERS[name]())
    tokenizer = Tokenizer(fast)  # type: ignore[arg-type]
    ids = [i % tokenizer.vocab_size for i in range(0, 3000, 7)]
    fast.num_decoded = 0
    stream = tokenizer.stream()
    for token_id in ids:
        stream.push(token_id)
    assert fast.num_decoded <= 8 * len(ids)


class CountingDecoder:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self.num_decoded = 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return str(self._fast.decode(ids, skip_special_tokens=skip_special_tokens))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)


def test_token_bytes_join_to_the_text() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("naïve 你好 🙂 <think>x</think>")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "naïve 你好 🙂 <think>x</think>"
    fallback = tokenizer_of("byte_fallback")
    ids = fallback.encode("the 🙂", add_special_tokens=False)
    assert b"".join(map(fallback.token_bytes, ids)).decode() == " the 🙂"
    assert fallback.token_bytes(10**6) == b""


# -- against transformers


FLAGS: list[dict[str, Any]] = [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}]
LLAMA = {"tokenizer_class": "LlamaTokenizerFast", "unk_token": "<unk>"}


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    ("name", "kind"), [("byte_level", {}), ("byte_fallback", {}), ("byte_fallback", LLAMA)]
)
def test_encode_and_decode_as_transformers(
    tmp_path: Path, name: str, kind: dict[str, Any], flags: dict[str, Any]
) -> None:
    config = kind | flags
    folder = folder_with(tmp_path, MAKERS[name](), tokenizer_config=config)
    ours, theirs = Tokenizer.from_folder(folder), reference(folder)
    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs(text)["input_ids"]
        plain = ours.encode(text, add_special_tokens=False).tolist()
        assert plain == theirs(text, add_special_tokens=False)["input_ids"]
        for skip in (True, False):
            expected = theirs.decode(plain, skip_special_tokens=skip)
            assert ours.decode(plain, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("template", [CHATML, WITH_BOS])
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_chat_as_transformers(tmp_path: Path, name: str, template: str) -> None:
    config = {"chat_template": template, "add_bos_token": True}
    folder = folder_with(tmp_path, MAKERS[name](), tokenizer_config=config)
    ours, theirs = Tokenizer.from_folder(folder), reference(folder)
    for count in range(1, len(MESSAGES) + 1):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                MESSAGES[:count], tokenize=True, add_generation_prompt=prompt, return_dict=True
            )
            got = ours.encode_chat(MESSAGES[:count], add_generation_prompt=prompt)
            assert got.tolist() == expected["input_ids"]
    bos = theirs.bos_token_id
    assert ours.encode_chat(MESSAGES).tolist().count(bos) == (1 if template == WITH_BOS else 0)


def test_jinja_file_wins_and_options_reach_the_template(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, byte_level(), tokenizer_config={"chat_template": "old"})
    source = "{% if thinking %}T{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    ours = Tokenizer.from_folder(folder)
    assert ours.render_chat([{"role": "user", "content": "hi"}]).text == "hi"
    text = ours.render_chat([{"role": "user", "content": "hi"}], template_options={"thinking": True}).text
    assert text == "Thi"


def test_options_may_have_any_name() -> None:
    tokenizer = Tokenizer(byte_level(), chat_template="{{ self }}{{ x }}{{ add_generation_prompt }}")
    options = {"self": 1, "x": 2, "add_generation_prompt": 3, "": 4, "messages": None}
    assert tokenizer.render_chat(MESSAGES, template_options=options).text.endswith("2True")


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
def test_text_without_a_utf8_form_is_refused(text: str) -> None:
    tokenizer = Tokenizer(byte_level(), chat_template=CHATML)
    with pytest.raises(RequestError, match="half a surrogate pair"):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match="half a surrogate pair"):
        tokenizer.encode_chat([{"role": "user", "content": text}])


# -- messages


def test_content_parts_are_joined() -> None:
    tokenizer = Tokenizer(byte_level(), chat_template=CHATML)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]).text.count("one\ntwo") == 1
    assert "<|im_start|>system" in tokenizer.render_chat([{"role": "developer", "content": "x"}]).text


def test_what_a_chat_refuses() -> None:
    with pytest.raises(RequestError, match=r"--chat-template FILE, or send .*/v1/completions") as refusal:
        Tokenizer(byte_level()).encode_chat(MESSAGES)
    assert refusal.value.code == "no_chat_template"
    tokenizer = Tokenizer(byte_level(), chat_template=WITH_BOS)
    with pytest.raises(RequestError, match="unknown role tool"):
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])
    with pytest.raises(UnsupportedParameterError, match="image_url") as image:
        tokenizer.encode_chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert image.value.param == "messages[0].content[0].type"
    for messages in ([], [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": [3]}]):
        with pytest.raises(RequestError):
            tokenizer.encode_chat(messages)


def test_a_template_cannot_leave_the_sandbox() -> None:
    escape = "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__ }}"
    tokenizer = Tokenizer(byte_level(), chat_template=escape)
    with pytest.raises(RequestError):
        tokenizer.render_chat(MESSAGES)
    with pytest.raises(ModelError, match="line 1"):
        Tokenizer(byte_level(), chat_template="{% if %}")


# -- folder


def test_end_tokens_and_recommended_sampling(tmp_path: Path) -> None:
    fast = byte_level()
    eos = fast.token_to_id("</s>")
    folder = folder_with(
        tmp_path,
        fast,
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [8, 9], "temperature": 0.6, "top_k": 20, "max_length": 4},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == {7, 8, 9, eos}
    assert tokenizer.default_sampling == {"temperature": 0.6, "top_k": 20}
    folder_with(folder, fast, generation_config={"do_sample": False, "temperature": 0.6})
    assert Tokenizer.from_folder(folder).default_sampling == {"temperature": 0.0}


def test_the_markers_of_reasoning() -> None:
    fast = byte_level()
    assert Tokenizer(fast).reasoning_token_ids == (fast.token_to_id("<think>"), fast.token_to_id("</think>"))
    assert Tokenizer(word_level()).reasoning_token_ids == ()
    fast = word_level()
    fast.add_tokens(["<think>", "[THINK]", "[/THINK]"])  # one marker alone marks nothing
    assert Tokenizer(fast).reasoning_token_ids == (fast.token_to_id("[THINK]"), fast.token_to_id("[/THINK]"))


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    folder_with(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_pattern_that_backtracks_without_end_is_an_error_of_the_request() -> None:
    """The Rust library panics there, and a panic is no `Exception`: it would end a thread of the server."""
    fast = byte_level()
    fast.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    tokenizer = Tokenizer(fast, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    assert tokenizer.encode("aaa")
    with pytest.raises(RequestError, match="tokenizer cannot process this text"):
        tokenizer.encode("a" * 60 + "b")
