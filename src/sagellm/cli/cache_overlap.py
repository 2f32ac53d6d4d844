"""`sagellm cache overlap`: what could be reused in other positions than prefixes."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

from sagellm.benchmarks.reporting import check_writable, print_tables, write_json
from sagellm.cli._options import argument, command, flag
from sagellm.cli.trace import BLOCK_TOKENS, Reading
from sagellm.core.errors import ConfigError

_PATH_HELP = "A trace, a list of prompts (JSON Lines), or the folder of a disk tier (kv.dir)."
_SIZES_HELP = "Tokens of a slice; may be repeated; default: 16, 64, 256, 1024."
WORDS = "words"


@command
def overlap(
    path: Path = argument("PATH", _PATH_HELP, ...),
    slice_tokens: list[int] | None = flag("N", _SIZES_HELP),
    block_tokens: int | None = BLOCK_TOKENS,
    out_file: Path | None = flag("--out -o FILE", "Write the counts there as JSON."),
    *,
    reading: Reading,
) -> None:
    """Count tokens that earlier texts had too, at any position, beyond equal prefixes.

    It is an upper bound for reuse in other positions, by the size of the slices that are kept. Texts are cut
    into words, unless --option tokenizer=FOLDER names a model's tokenizer.
    """
    from sagellm.benchmarks import overlap as counting

    if out_file is not None:
        check_writable(out_file)
    sizes = tuple(slice_tokens or counting.SLICE_TOKENS)
    if min(sizes) < 1:
        raise ConfigError(f"--slice-tokens {min(sizes)}: at least 1")
    if path.is_dir():
        from sagellm.kvmgr.kv_pool.tiers.disk_reader import FolderReader

        with closing(FolderReader(path)) as reader:
            blocks = [row.block for _, row in reader.rows() if row is not None]
        blocks.sort(key=lambda block: -block.used_s)
        found = counting.stored_overlap(str(path), blocks, sizes)
    else:
        found = counting.trace_overlap(reading.read(path, tokenizer=WORDS), sizes, block_tokens)
    print(counting.headline(found))
    print_tables([counting.as_table(found)])
    if out_file is not None:
        write_json(out_file, dataclasses.asdict(found))
