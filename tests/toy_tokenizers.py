"""Small tokenizers of every kind that a model folder may hold, made in milliseconds."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café 你好 世界 🙂🙃 日本語",
    "  spaces   and\nlines\n\n",
] * 8
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> FastTokenizer:
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return fast


def byte_fallback() -> FastTokenizer:
    """As Llama 2: metaspace, byte tokens for what is not in the vocabulary."""
    pieces = ["▁", "▁the", "▁a", "你", "\ufffd", *"abcdefghijklmnopqrstuvwxyz12+=.,<>/?!:TWhé"]
    vocab = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\n", *dict.fromkeys(pieces)]
    fast = FastTokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(dict.fromkeys(vocab))},
            [("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    fast.add_special_tokens(["<unk>", *SPECIAL])
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(parts)
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", fast.token_to_id("<s>"))]
    )
    return fast


def metaspace() -> FastTokenizer:
    fast = byte_fallback()
    fast.decoder = decoders.Metaspace()
    return fast


def word_level() -> FastTokenizer:
    words = ["<unk>", *SPECIAL, "hello", "world", "naïve", "你好", "\ufffd", "a", "b."]
    fast = FastTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_special_tokens(SPECIAL)
    return fast


def word_piece() -> FastTokenizer:
    words = ["[UNK]", *SPECIAL, "hello", "##lo", "##wor", "do", "n't", ".", ",", "你"]
    fast = FastTokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    return fast


def mixed_bytes() -> FastTokenizer:
    fast = byte_level()
    fast.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return fast


MAKERS: dict[str, Callable[[], FastTokenizer]] = {
    maker.__name__: maker
    for maker in (byte_level, byte_fallback, metaspace, word_level, word_piece, mixed_bytes)
}
