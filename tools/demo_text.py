"""The demo model's tokenizer and chat template. Also encodes conversations into training rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_data import Conversation, training_conversation

TEXT_END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, THINK_END = "<think>", "</think>"
VOCABULARY = 768
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Row:
    """Token ids of one conversation; ``learnt[i]`` tells whether id i is the assistant's own."""

    ids: list[int]
    learnt: list[bool]


def message_text(role: str, content: str) -> str:
    """One message as the chat template renders it."""
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def prompt_text(conversation: Conversation) -> str:
    """The conversation up to its last question and the generation prompt. The chat template renders it."""
    rendered = [message_text(message["role"], message["content"]) for message in conversation.messages()]
    return "".join(rendered) + f"{TURN_START}assistant\n"


def pieces(conversation: Conversation) -> Iterator[tuple[str, bool]]:
    """The rendered conversation in pieces, each with whether the assistant says it."""
    if conversation.system is not None:
        yield message_text("system", conversation.system), False
    for turn in conversation.turns:
        yield message_text("user", turn.user) + f"{TURN_START}assistant\n", False
        yield turn.answer + TURN_END, True
        yield "\n", False


def encode(tokenizer: Tokenizer, conversations: list[Conversation]) -> list[Row]:
    """Returns training rows. The cuts are at pre-token bounds, so the ids are those of the whole rendered
    text."""
    cut = [list(pieces(conversation))[:-1] for conversation in conversations]
    encoded = iter(tokenizer.encode_batch([text for row in cut for text, _ in row], add_special_tokens=False))
    rows = []
    for row in cut:
        ids: list[int] = []
        learnt: list[bool] = []
        for _, own in row:
            new = next(encoded).ids
            ids += new
            learnt += [own] * len(new)
        rows.append(Row(ids, learnt))
    return rows


def train_tokenizer(seed: int, conversations: int = 20000) -> Tokenizer:
    """A byte-level BPE over the first training conversations.

    Every digit, space and sign is a token of its own and only letters merge, so a number or a word has the
    same ids wherever it stands, and any text at all survives encoding and decoding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|[^\p{L}]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        special_tokens=[TEXT_END, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, conversations), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (THINK, THINK_END)])
    return tokenizer


def corpus(seed: int, conversations: int) -> Iterator[str]:
    """Plain texts of training conversations, without the special tokens."""
    yield "system user assistant"
    for index in range(conversations):
        made = training_conversation(seed, index)
        for turn in made.turns:
            yield turn.user
            yield turn.answer.replace(THINK, "").replace(THINK_END, "")
        if made.system is not None:
            yield made.system


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template)."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": TEXT_END,
        "eos_token": TURN_END,
        "pad_token": TEXT_END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
