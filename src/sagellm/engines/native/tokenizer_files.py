"""From a model folder's files to a tokenizer: tokenizer.json, or vocab.json and merges.txt.

vocab.json and merges.txt are the files of GPT-2 and OPT from before tokenizer.json. They hold a byte-level
BPE (Radford et al. 2019), with the tokens and options that tokenizer_config.json, special_tokens_map.json and
added_tokens.json name. The ids are those of transformers' `GPT2Tokenizer`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from sagellm.core.errors import ModelError
from sagellm.engines.native.folder_files import (
    SPECIAL_NAMES,
    BpeConfigJson,
    NewTokenJson,
    check_token_ids,
    checked,
    read_model_text,
    read_object,
    read_optional,
)

VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
_DEFAULT = "<|endoftext|>"


def tokenizer_file(folder: Path) -> Path:
    """tokenizer.json of a model folder, or else its vocab.json. Raises `ModelError` if the folder has
    neither, or no merges.txt beside vocab.json.
    """
    if os.path.lexists(folder / "tokenizer.json"):
        return folder / "tokenizer.json"
    if os.path.lexists(folder / VOCAB_FILE) and os.path.lexists(folder / MERGES_FILE):
        return folder / VOCAB_FILE
    raise ModelError(
        f"{folder} has no tokenizer.json, nor {VOCAB_FILE} and {MERGES_FILE}; transformers writes one with "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


def read_tokenizer(folder: Path) -> FastTokenizer:
    """The tokenizer of a model folder. Raises `ModelError` if it has none that can be read."""
    path = tokenizer_file(folder)
    return read_bpe(folder) if path.name == VOCAB_FILE else _read_whole(path)


def _read_whole(path: Path) -> FastTokenizer:
    content = read_object(path)
    model, added = content.get("model"), content.get("added_tokens")
    if not isinstance(model, dict) or not isinstance(added, list | None):
        raise ModelError(f"{path} is not a tokenizer: it has no object named model")
    vocab = model.get("vocab")
    check_token_ids(vocab.values() if isinstance(vocab, dict) else (), path)
    check_token_ids([token.get("id") if isinstance(token, dict) else token for token in added or ()], path)
    try:
        return FastTokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare exceptions, and panics are not even those
        raise ModelError(f"{path} is not a tokenizer: {str(error)[:200]}") from error


def read_bpe(folder: Path) -> FastTokenizer:
    """The tokenizer in vocab.json and merges.txt. Raises `ModelError` for files that make none."""
    config = _config(folder)
    vocab = read_object(folder / VOCAB_FILE)
    check_token_ids(vocab.values(), folder / VOCAB_FILE)
    try:
        fast = FastTokenizer(models.BPE(vocab, _merges(folder / MERGES_FILE)))
    except ModelError:
        raise
    except Exception as error:  # the library raises bare exceptions
        raise ModelError(f"{folder}: {VOCAB_FILE} and {MERGES_FILE} are no tokenizer: {error}") from error
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.add_prefix_space))
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens(list(_added_tokens(folder, config, vocab)))
    bos, eos = config.bos_token, config.eos_token
    first = [bos.content] if config.add_bos_token and bos else []
    last = [eos.content] if config.add_eos_token and eos else []
    if first or last:
        fast.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(text, fast.token_to_id(text)) for text in dict.fromkeys(first + last)],
        )
    return fast


def _config(folder: Path) -> BpeConfigJson:
    """tokenizer_config.json; special_tokens_map.json fills in missing values."""
    content: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        found = read_optional(path)
        checked(BpeConfigJson, found, path)
        content |= {key: value for key, value in found.items() if value is not None}
    return checked(BpeConfigJson, content, folder / "tokenizer_config.json")


def _merges(path: Path) -> list[tuple[str, str]]:
    """One merge per line, two tokens with a space between, after a version line."""
    merges = []
    for number, line in enumerate(read_model_text(path).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.rstrip("\r").partition(" ")
        if not space or " " in right:
            raise ModelError(f"{path}, line {number}: {line[:40]!r} is not two tokens with a space between")
        merges.append((left, right))
    return merges


def _added_tokens(folder: Path, config: BpeConfigJson, vocab: Mapping[str, int]) -> Iterator[AddedToken]:
    """Added tokens in order of their ids, which they keep; then other special tokens."""
    path = folder / "added_tokens.json"
    by_id = {token_id: NewTokenJson(content=text) for text, token_id in read_optional(path).items()}
    check_token_ids(by_id, path)
    for key, token in (config.added_tokens_decoder or {}).items():
        if not key.isdecimal():
            raise ModelError(f"{folder / 'tokenizer_config.json'}: {key!r} in added_tokens_decoder is no id")
        by_id[int(key)] = token
    named = [token for name in SPECIAL_NAMES if (token := getattr(config, name)) is not None]
    if not named and _DEFAULT in vocab:
        named = [NewTokenJson(content=_DEFAULT)]
    named += [*(config.additional_special_tokens or ()), *(config.extra_special_tokens or ())]
    special = {token.content for token in named}
    known = {token.content for token in by_id.values()}
    for _, token in sorted(by_id.items()):
        yield _made(token, special=token.special or token.content in special)
    for token in {token.content: token for token in reversed(named)}.values():
        if token.content not in known:
            yield _made(token, special=True)


def _made(token: NewTokenJson, *, special: bool) -> AddedToken:
    return AddedToken(**token.model_dump(exclude={"special"}), special=special)
