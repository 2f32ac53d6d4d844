"""Commands for the KV in a disk tier's folder, or of a server.

`sagellm cache stat | ls | verify | export | import | clear`.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sagellm.benchmarks.reporting import Table, print_tables
from sagellm.cli._loading import as_text
from sagellm.cli._options import argument, command, flag
from sagellm.cli.cache_server import clear_server, server_tables, server_values
from sagellm.core.errors import ConfigError
from sagellm.core.files import open_regular
from sagellm.core.types import TOKEN_BYTES

if TYPE_CHECKING:
    from sagellm.kvmgr.kv_pool.tiers.disk_reader import FolderReader

STREAM = "-"
EXIT_FOUND = 1
_DIR = "Folder of a server's disk tier (its kv.dir)."
_URL = "A running sageLLM server."
_JSON = "Print JSON."


@command
def stat(
    url: str | None = flag("--url URL", f"{_URL} Default without --dir."),
    folder: Path | None = flag("--dir FOLDER", f"{_DIR} A server may use it meanwhile."),
    *,
    as_json: bool = flag("--json", _JSON, False),
) -> None:
    """Show what the KV cache of a server, or of one folder, holds.

    Of a server: the device, all tiers, and hits and misses since its start. A folder is only read, and its
    lock is not taken.
    """
    if url is not None and folder is not None:
        raise ConfigError("name a server with --url or a folder with --dir, not both")
    if folder is None:
        values = server_values(url)
        tables = server_tables(values)
    else:
        with _reading(folder) as reader:
            values = _folder_values(reader)
        tables = [Table(f"KV blocks in {folder}", ("", "value"), _folder_rows(values), num_names=2)]
    if as_json:
        print(json.dumps(values, indent=1))
    else:
        print_tables(tables)


@command
def ls(
    folder: Path = flag("--dir FOLDER", f"{_DIR} A server may use it meanwhile.", ...),
    limit: int = flag("--limit -n N", "Most lines.", 20, min=1),
    sort: Literal["used", "tokens"] = flag(
        "--sort NAME", "used (last first) or tokens (most first).", "used"
    ),
    *,
    blocks: bool = flag("--blocks", "Every block, not only the last of each path.", False),
    as_json: bool = flag("--json", _JSON, False),
) -> None:
    """List the cached paths of a folder, with their last use.

    A path is the beginning of a prompt: its tokens up to a block behind which no other is stored. Namespaces
    (tenant, model, adapter, KV dtype) are shown as digests.
    """
    with _reading(folder) as reader:
        found = _paths(reader, sort, blocks=blocks)
    shown = found[:limit]
    if as_json:
        print(json.dumps(shown, indent=1))
        return
    kind = "blocks" if blocks else "paths"
    columns = ("hash", "namespace", "last use", "tokens", "blocks", "slot")
    rows = [
        (
            each["hash"][:16],
            each["namespace"],
            _time(each["used_s"]),
            *_counts(each, "tokens", "blocks", "slot"),
        )
        for each in shown
    ]
    print_tables([Table(f"{len(shown):,} of {len(found):,} {kind} in {folder}", columns, rows, num_names=3)])


@command
def verify(
    folder: Path = flag("--dir FOLDER", f"{_DIR} A server may use it meanwhile, without --drop.", ...),
    *,
    drop: bool = flag("--drop", "Remove the bad blocks; no server may use the folder.", False),
    as_json: bool = flag("--json", _JSON, False),
) -> None:
    """Read every block of a folder, and compare header, checksum, tokens and prefix.

    Exit status 1 if any block is bad, also if --drop has removed it.
    """
    from sagellm.kvmgr.kv_pool.tiers.disk import CATALOGUE_FILE
    from sagellm.kvmgr.kv_pool.tiers.disk_catalogue import DiskCatalogue
    from sagellm.kvmgr.kv_pool.tiers.disk_verify import verify_folder
    from sagellm.kvmgr.prefix_cache.fingerprint import block_hash

    with _owning(folder, needed=drop):
        with _reading(folder) as reader, _progress("verifying") as progress:
            found, block_format = verify_folder(reader, block_hash, progress), reader.format
        if drop and found.bad:
            with closing(DiskCatalogue(folder / CATALOGUE_FILE, block_format)) as catalogue:
                catalogue.commit([], found.bad, {})
    num_dropped = len(found.bad) if drop else 0
    if as_json:
        values: dict[str, Any] = {
            "blocks": found.num_blocks,
            "changed": found.num_changed,
            "twins": found.num_twins,
        }
        values |= {"bad": dict(found.causes), "dropped": num_dropped}
        print(json.dumps(values, indent=1))
    else:
        right = found.num_blocks - found.num_changed - len(found.bad)
        print(f"{right:,} of {found.num_blocks:,} blocks are right, with {as_text(found.num_bytes)}")
        _print_causes("bad", found.causes)
        if found.num_twins:
            print(
                f"{found.num_twins:,} blocks are stored twice; the next start of a server frees one of each"
            )
        if found.num_changed:
            print(f"{found.num_changed:,} blocks were replaced by a server meanwhile")
        if num_dropped:
            print(f"{num_dropped:,} blocks are dropped")
        elif found.bad:
            print(
                f"remove them with `sagellm cache verify --dir {folder} --drop`; a server computes them again"
            )
    if found.bad:
        raise typer.Exit(EXIT_FOUND)


@command
def export(
    file: str = argument("FILE", f"A new file; {STREAM} for standard output.", ...),
    folder: Path = flag("--dir FOLDER", f"{_DIR} A server may use it meanwhile.", ...),
) -> None:
    """Write the blocks of a folder to a file, for `sagellm cache import`.

    Only blocks that verify, behind a whole prefix; those that were used last come first. The file holds the
    tokens of prompts and answers.
    """
    from sagellm.kvmgr.kv_pool.tiers.disk_transfer import export_blocks
    from sagellm.kvmgr.prefix_cache.fingerprint import block_hash

    with _reading(folder) as reader, _written(file) as target, _progress("exporting") as progress:
        report = export_blocks(reader, target, block_hash, progress)
    done = f"exported {report.num_blocks:,} blocks with {as_text(report.num_bytes)}"
    print(f"{done} ({report.codec})", file=sys.stderr)
    _print_causes("left out", report.skipped, file=sys.stderr)


@command
def import_(
    file: str = argument("FILE", f"What `sagellm cache export` wrote; {STREAM} for standard input.", ...),
    folder: Path = flag("--dir FOLDER", "Folder that no server uses; made if it is missing.", ...),
    disk_gb: float | None = flag(
        "--disk-gb GIB",
        "Grow the folder to this size. Default: as it is; a new one as the file needs.",
        min=0.0,
    ),
) -> None:
    """Add the blocks of a file to a folder, each verified. What the folder holds stays, nothing is evicted.

    Checksums show damage, not a file that was made to deceive: import files of those you trust. Exit status 1
    if any block of the file is bad.
    """
    from sagellm.kvmgr.kv_pool.tiers.block_file import BlockFileReader
    from sagellm.kvmgr.kv_pool.tiers.disk_slab import slot_bytes
    from sagellm.kvmgr.kv_pool.tiers.disk_transfer import NO_ROOM, PRESENT, import_blocks
    from sagellm.kvmgr.prefix_cache.fingerprint import block_hash

    with _explained(file), _opened(file) as stream:
        source = BlockFileReader(stream, "the input" if file == STREAM else file)
        num_slots = int((disk_gb or 0) * 2**30) // slot_bytes(source.format.bytes_per_block)
        if disk_gb and not num_slots:
            raise ConfigError(
                f"--disk-gb {disk_gb:g} holds no block of {source.format.bytes_per_block:,} bytes"
            )
        with _explained(str(folder)), _progress("importing") as progress:
            report = import_blocks(source, folder, block_hash, num_slots, progress)
    print(f"imported {report.num_blocks:,} blocks with {as_text(report.num_bytes)} into {folder}")
    _print_causes("not imported", report.skipped)
    if report.skipped[NO_ROOM]:
        print("the folder is full: make it larger with --disk-gb")
    needs = "" if report.codec == "raw" else f" --set kv.codec={report.codec}"
    print(f"serve with --kv-dir {folder}{needs} and a --kv-disk-gb that holds them")
    if report.skipped.keys() - {NO_ROOM, PRESENT}:
        raise typer.Exit(EXIT_FOUND)


@command
def clear(
    url: str | None = flag("--url URL", f"{_URL} Needs its admin key."),
    folder: Path | None = flag("--dir FOLDER", f"{_DIR} No server may use it."),
    admin_key: str | None = flag(
        "--admin-key KEY", "Default: the environment variable SAGELLM_SERVER_ADMIN_KEY."
    ),
    *,
    yes: bool = flag("--yes -y", "Do not ask.", False),
) -> None:
    """Remove all cached KV of a server, or of one folder.

    Of a server on the device and in all tiers; it keeps blocks that requests and pins use. Of a folder the
    lock and files of others stay.
    """
    if (url is None) == (folder is None):
        raise ConfigError("name a server with --url, or a folder with --dir")
    if folder is None:
        assert url is not None
        _confirm(f"Clear the KV cache of {url}?", yes=yes)
        print(f"cleared {clear_server(url, admin_key):,} blocks of {url}")
        return
    from sagellm.kvmgr.kv_pool.tiers.disk_reader import remove_blocks

    with _explained(str(folder)), _owning(folder, needed=True):
        _confirm(f"Remove all KV blocks in {folder}?", yes=yes)
        print(f"cleared {folder}: {as_text(remove_blocks(folder))} are free again")


# -- folders


@contextmanager
def _reading(folder: Path) -> Iterator[FolderReader]:
    from sagellm.kvmgr.kv_pool.tiers.disk_reader import FolderReader

    with _explained(str(folder)), closing(FolderReader(folder)) as reader:
        yield reader


@contextmanager
def _owning(folder: Path, *, needed: bool) -> Iterator[None]:
    """Hold the lock of a folder that is there. Raises `ConfigError` where a server has it."""
    from sagellm.kvmgr.kv_pool.tiers.disk_folder import OwnedFolder
    from sagellm.kvmgr.kv_pool.tiers.disk_reader import check_folder

    if not needed:
        yield
        return
    check_folder(folder)
    with _explained(str(folder)), closing(OwnedFolder(folder)):
        yield


def _folder_values(reader: FolderReader) -> dict[str, Any]:
    links = reader.links().values()
    used_s = [link.used_s for link in links]
    size = reader.format.bytes_per_block
    return {
        "owner": reader.owner() or None,
        "format": reader.format.digest.hex(),
        "details": dict(reader.format.details),
        "bytes_per_block": size,
        "tokens_per_block": reader.token_bytes // TOKEN_BYTES,
        "codec": reader.codec,
        "blocks": len(links),
        "twins": reader.num_rows() - len(links),
        "compressed_blocks": sum(link.num_bytes < size for link in links),
        "bytes": sum(link.num_bytes for link in links),
        "total_blocks": reader.num_slots,
        "slab_bytes": reader.slab_bytes,
        "missing_slab_bytes": max(0, reader.num_slots * reader.slot_bytes - reader.slab_bytes),
        "namespaces": len({link.namespace for link in links}),
        "oldest_use_s": min(used_s, default=None),
        "newest_use_s": max(used_s, default=None),
    }


def _folder_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    details = ", ".join(
        f"{name.replace('_', ' ')} {values['details'][name]}"
        for name in ("model_fingerprint", "dtype", "layout", "num_layers", "num_kv_heads", "head_dim")
        if name in values["details"]
    )
    used, total = values["blocks"] + values["twins"], values["total_blocks"]
    twins = f", {values['twins']:,} of them twice" if values["twins"] else ""
    slab = as_text(values["slab_bytes"])
    if missing := values["missing_slab_bytes"]:
        slab += f", {as_text(missing)} too short: blocks behind its end are lost"
    return [
        ("in use by process", values["owner"] or "none, as far as the system says"),
        ("format", values["format"]),
        ("of", details or "not recorded by the sagellm that wrote it"),
        ("one block", f"{values['tokens_per_block']:,} tokens, {values['bytes_per_block']:,} bytes"),
        ("codec", f"{values['codec']}; {values['compressed_blocks']:,} blocks are compressed"),
        ("blocks", f"{used:,} of {total:,} slots ({used / max(1, total):.1%}){twins}"),
        ("as stored", as_text(values["bytes"])),
        ("slab", slab),
        ("namespaces", f"{values['namespaces']:,}"),
        ("oldest use", _time(values["oldest_use_s"])),
        ("newest use", _time(values["newest_use_s"])),
    ]


def _paths(reader: FolderReader, sort: str, *, blocks: bool) -> list[dict[str, Any]]:
    """The last block of each path, or every block. `blocks` is 0 where a part of the prefix is missing."""
    from sagellm.kvmgr.kv_pool.tiers.disk_reader import depths

    links = reader.links()
    depth, parents = depths(links), {link.parent for link in links.values()}
    tokens = reader.token_bytes // TOKEN_BYTES
    found = [
        {
            "hash": token_hash.hex(),
            "namespace": _digest(link.namespace),
            "used_s": link.used_s,
            "tokens": depth[token_hash] * tokens,
            "blocks": depth[token_hash],
            "slot": link.slot,
            "bytes": link.num_bytes,
        }
        for token_hash, link in links.items()
        if blocks or token_hash not in parents
    ]
    key = "used_s" if sort == "used" else "tokens"
    return sorted(found, key=lambda each: (-each[key], each["slot"]))


def _digest(namespace: str) -> str:
    return blake2b(namespace.encode(), digest_size=4).hexdigest()


def _counts(values: Mapping[str, int], *names: str) -> list[str]:
    return [f"{values[name]:,}" for name in names]


def _time(seconds: float | None) -> str:
    """A time in UTC, or why there is none."""
    if seconds is None:
        return "no block"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g} s"


# -- files, questions, errors


@contextmanager
def _written(file: str) -> Iterator[BinaryIO]:
    """A new file of this user alone, or standard output.

    It is removed again if it does not become whole.
    """
    if file == STREAM:
        with _explained("standard output"):
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{file} exists: name a new file, or remove it") from error
    except OSError as error:
        raise ConfigError(
            f"cannot write {file}: {error.strerror}; name a file in a folder of yours"
        ) from error
    try:
        with _explained(file), os.fdopen(fd, "wb") as target:
            yield target
    except BaseException:
        Path(file).unlink()
        raise


@contextmanager
def _opened(file: str) -> Iterator[io.BufferedIOBase]:
    if file == STREAM:
        yield cast(io.BufferedIOBase, sys.stdin.buffer)
        return
    with open_regular(Path(file)) as stream:
        yield cast(io.BufferedIOBase, stream)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Errors of a disk as one line that names the file or folder."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename or name}: {error.strerror or error}") from error


@contextmanager
def _progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal."""
    terminal = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_causes(what: str, causes: Mapping[str, int], file: Any = None) -> None:
    for cause, count in sorted(causes.items()):
        if count:
            print(f"  {what}: {count:,} {cause.replace('_', ' ')}", file=file)


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("add --yes: this removes cached KV, and there is no terminal to ask")
    if not typer.confirm(question):
        raise typer.Exit(EXIT_FOUND)
