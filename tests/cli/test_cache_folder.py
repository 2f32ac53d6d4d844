"""`sagellm cache stat | ls | verify | export | import | clear` of folders that a real `DiskStorage` wrote."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.protocols.kv_tiers import BlockFormat, ReadOutcome
from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS
from sagellm.kvmgr.kv_pool.tiers.disk import CATALOGUE_FILE
from sagellm.kvmgr.kv_pool.tiers.disk_slab import ALIGNMENT, SLAB_FILE
from tests.kvmgr.tiers.storages.chained_folder import DETAILED, make_folder, path_blocks, two_tenants
from tests.kvmgr.tiers.storages.stored_blocks import BLOCK_BYTES, open_disk, read, write

SLOT_BYTES = ALIGNMENT + BLOCK_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path / "kv")
    return tmp_path / "kv"


def shown(cli: Any, *arguments: str, exit_code: int = 0) -> Any:
    result = cli("cache", *arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def flip(folder: Path, slot: int, offset: int = ALIGNMENT + 5) -> None:
    with (folder / SLAB_FILE).open("r+b") as slab:
        slab.seek(slot * SLOT_BYTES + offset)
        byte = slab.read(1)[0]
        slab.seek(-1, os.SEEK_CUR)
        slab.write(bytes([byte ^ 1]))


def change(folder: Path, statement: str, *values: Any) -> None:
    catalogue = sqlite3.connect(folder / CATALOGUE_FILE)
    catalogue.execute(statement, values)
    catalogue.commit()
    catalogue.close()


# -- stat


def test_stat_of_a_folder(cli: Any, folder: Path) -> None:
    found = shown(cli, "stat", "--dir", str(folder))
    assert found["blocks"] == 10
    assert found["total_blocks"] == 16
    assert found["bytes"] == 10 * BLOCK_BYTES
    assert found["slab_bytes"] == 16 * SLOT_BYTES
    assert (found["oldest_use_s"], found["newest_use_s"]) == (1000.0, 2000.0)
    assert (found["namespaces"], found["tokens_per_block"], found["codec"]) == (2, 4, "raw")
    assert found["details"]["dtype"] == "float32"
    assert found["owner"] is None
    text = cli("cache", "stat", "--dir", str(folder)).output
    assert "10 of 16 slots (62.5%)" in text
    assert "1970-01-01 00:33:20 UTC" in text


def test_an_empty_folder_has_no_times(cli: Any, tmp_path: Path) -> None:
    make_folder(tmp_path / "kv", [])
    assert "no block" in cli("cache", "stat", "--dir", str(tmp_path / "kv")).output
    assert shown(cli, "ls", "--dir", str(tmp_path / "kv")) == []
    assert shown(cli, "verify", "--dir", str(tmp_path / "kv"))["bad"] == {}


def test_compressed_blocks_are_counted(cli: Any, tmp_path: Path) -> None:
    make_folder(tmp_path / "kv", codec=CODECS.create("zstd", dtype="float32"))
    found = shown(cli, "stat", "--dir", str(tmp_path / "kv"))
    assert found["codec"] == "zstd"
    assert 0 < found["compressed_blocks"] < 10
    assert found["bytes"] < 10 * BLOCK_BYTES
    assert shown(cli, "verify", "--dir", str(tmp_path / "kv"))["bad"] == {}


def test_all_that_reads_works_beside_an_owner(cli: Any, folder: Path, tmp_path: Path) -> None:
    """And all that writes is refused with the owner's name."""
    owner = open_disk(folder, 16, block_format=DETAILED)
    owner.recover()
    owner.forget([9])
    write(owner, *path_blocks("c", [5], slot=12))
    found = shown(cli, "stat", "--dir", str(folder))
    assert found["blocks"] == 10
    if Path("/proc/locks").exists():
        assert found["owner"] == str(os.getpid())
    assert len(shown(cli, "ls", "--dir", str(folder), "--blocks")) == 10
    assert shown(cli, "verify", "--dir", str(folder))["blocks"] == 10
    assert cli("cache", "export", str(tmp_path / "file"), "--dir", str(folder)).exit_code == 0
    for arguments in (["verify", "--drop"], ["clear", "--yes"], ["import", str(tmp_path / "file")]):
        result = cli("cache", *arguments, "--dir", str(folder))
        assert result.exit_code == 2
        assert f"in use by process {os.getpid()}: stop it" in result.output
    owner.check()
    owner.close()


def test_a_folder_after_kill_9(cli: Any, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path;"
        "from tests.kvmgr.tiers.storages import chained_folder as c, stored_blocks as s;"
        "disk = s.open_disk(Path(sys.argv[1]), 16, block_format=c.DETAILED); disk.recover();"
        "s.write(disk, *c.two_tenants()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "kv")], check=False)
    assert shown(cli, "stat", "--dir", str(tmp_path / "kv"))["blocks"] == 10
    assert shown(cli, "verify", "--dir", str(tmp_path / "kv"))["bad"] == {}


# -- ls


def test_paths_and_blocks(cli: Any, folder: Path) -> None:
    found = shown(cli, "ls", "--dir", str(folder))
    assert [(each["used_s"], each["tokens"], each["blocks"]) for each in found] == [
        (2000.0, 16, 4), (1500.0, 16, 4), (1000.0, 16, 4),
    ]  # fmt: skip
    assert len({each["namespace"] for each in found}) == 2
    blocks = shown(cli, "ls", "--dir", str(folder), "--blocks", "--sort", "tokens", "--limit", "4")
    assert [each["blocks"] for each in blocks] == [4, 4, 4, 3]
    text = cli("cache", "ls", "--dir", str(folder), "-n", "1").output
    assert "1 of 3 paths" in text
    assert '"a"' not in text  # tenants are shown as digests


def test_a_path_without_its_head_has_no_tokens(cli: Any, folder: Path) -> None:
    change(folder, "DELETE FROM blocks WHERE slot = 6")
    found = shown(cli, "ls", "--dir", str(folder))
    assert sorted(each["tokens"] for each in found) == [0, 16, 16]


# -- verify


Damage = Callable[[Path], None]
DAMAGES: dict[str, tuple[Damage, dict[str, int]]] = {
    "payload": (lambda folder: flip(folder, 1), {"corrupt": 1, "no_prefix": 4}),
    "header": (lambda folder: flip(folder, 3, 9), {"corrupt": 1}),
    "last": (lambda folder: flip(folder, 5), {"corrupt": 1}),
    "tokens": (
        lambda folder: change(folder, "UPDATE blocks SET tokens = ? WHERE slot = 5", bytes(16)),
        {"other_tokens": 1},
    ),
    "namespace": (
        lambda folder: change(
            folder, "UPDATE blocks SET namespace = ? WHERE slot = 5", '["b", "", "", ""]'
        ),
        {"no_prefix": 1},
    ),
    "no namespace": (
        lambda folder: change(folder, "UPDATE blocks SET namespace = ? WHERE slot = 5", "[" * 100_000),
        {"corrupt": 1},
    ),
    "types": (lambda folder: change(folder, "UPDATE blocks SET used_s = 'x' WHERE slot = 5"), {"corrupt": 1}),
    "row of another block": (
        lambda folder: change(folder, "UPDATE blocks SET slot = 15 WHERE slot = 5"),
        {"absent": 1},
    ),
    "slot that cannot be": (
        lambda folder: change(folder, f"UPDATE blocks SET slot = {2**62} WHERE slot = 5"),
        {"io_error": 1},
    ),
    "size": (
        lambda folder: change(folder, "UPDATE blocks SET num_bytes = 100 WHERE slot = 5"),
        {"absent": 1},
    ),
    "truncated slab": (lambda folder: os.truncate(folder / SLAB_FILE, 8 * SLOT_BYTES), {"absent": 2}),
    "no slab": (lambda folder: (folder / SLAB_FILE).unlink(), {"absent": 10}),
    "head missing": (lambda folder: change(folder, "DELETE FROM blocks WHERE slot = 0"), {"no_prefix": 5}),
    "cycle": (
        lambda folder: change(
            folder,
            "UPDATE blocks SET parent = (SELECT token_hash FROM blocks WHERE slot = 9) WHERE slot = 6",
        ),
        {"other_tokens": 1, "no_prefix": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "causes"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_found_and_dropped(
    cli: Any, folder: Path, tmp_path: Path, damage: Damage, causes: dict[str, int]
) -> None:
    damage(folder)
    num_blocks = 9 if causes == {"no_prefix": 5} else 10
    found = shown(cli, "verify", "--dir", str(folder), exit_code=1)
    assert found == {"blocks": num_blocks, "changed": 0, "twins": 0, "bad": causes, "dropped": 0}
    text = cli("cache", "verify", "--dir", str(folder))
    assert text.exit_code == 1
    assert "--drop" in text.output
    num_bad = sum(causes.values())
    # An export leaves out the same blocks.
    assert cli("cache", "export", str(tmp_path / "file"), "--dir", str(folder)).exit_code == 0
    result = cli("cache", "import", str(tmp_path / "file"), "--dir", str(tmp_path / "new"))
    assert f"imported {num_blocks - num_bad} blocks" in result.output
    dropped = shown(cli, "verify", "--dir", str(folder), "--drop", exit_code=1)
    assert dropped["dropped"] == num_bad
    assert shown(cli, "verify", "--dir", str(folder))["blocks"] == num_blocks - num_bad
    storage = open_disk(folder, 16, block_format=DETAILED)
    left = storage.recover()
    assert len(left) == num_blocks - num_bad
    assert set(read(storage, *left)) <= {ReadOutcome.OK}
    storage.close()


def test_a_twin_is_not_bad_and_stands_in_for_a_bad_block(cli: Any, folder: Path) -> None:
    """Two requests that compute one prompt at once may both write it."""
    make_folder(folder, [*two_tenants(), two_tenants()[0]._replace(slot=11, used_s=1.0)])
    assert shown(cli, "verify", "--dir", str(folder))["twins"] == 1
    assert "1 of them twice" in cli("cache", "stat", "--dir", str(folder)).output
    flip(folder, 0)
    assert shown(cli, "verify", "--dir", str(folder), "--drop", exit_code=1)["bad"] == {"corrupt": 1}
    assert shown(cli, "verify", "--dir", str(folder))["blocks"] == 10


# -- export and import


def test_a_round_trip(cli: Any, folder: Path, tmp_path: Path) -> None:
    done = cli("cache", "export", str(tmp_path / "file"), "--dir", str(folder))
    assert "exported 10 blocks" in done.output
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    new = tmp_path / "deep" / "new"
    done = cli("cache", "import", str(tmp_path / "file"), "--dir", str(new))
    assert done.exit_code == 0, done.output
    assert "imported 10 blocks" in done.output
    assert new.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in new.iterdir()} == {0o600}
    storage = open_disk(new, 16, block_format=DETAILED)
    found = {block._replace(slot=0) for block in storage.recover()}
    assert found == {block._replace(slot=0) for block in two_tenants()}
    storage.check()
    storage.close()
    again = cli("cache", "import", str(tmp_path / "file"), "--dir", str(new))
    assert again.exit_code == 0
    assert "imported 0 blocks" in again.output
    assert "10 present" in again.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_export_to_a_full_disk_names_the_file(
    cli: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def open_full(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        is_target = str(path) == str(tmp_path / "file")
        if is_target:
            real_open(path, flags, *arguments, **options)
        return (
            real_open("/dev/full", os.O_WRONLY)
            if is_target
            else real_open(path, flags, *arguments, **options)
        )

    monkeypatch.setattr(os, "open", open_full)
    done = cli("cache", "export", str(tmp_path / "file"), "--dir", str(folder))
    assert done.exit_code == 2
    assert f"{tmp_path / 'file'}: No space left" in done.output
    assert str(folder) not in done.output
    assert not (tmp_path / "file").exists()


def test_a_small_folder_takes_the_paths_used_last(cli: Any, folder: Path, tmp_path: Path) -> None:
    cli("cache", "export", str(tmp_path / "file"), "--dir", str(folder))
    make_folder(tmp_path / "small", path_blocks("c", [9], slot=1, used_s=3.0), num_slots=7)
    done = cli("cache", "import", str(tmp_path / "file"), "--dir", str(tmp_path / "small"))
    assert done.exit_code == 0
    assert "imported 6 blocks" in done.output
    assert "not imported: 4" in done.output
    assert "--disk-gb" in done.output
    found = shown(cli, "ls", "--dir", str(tmp_path / "small"))
    assert [(each["used_s"], each["blocks"]) for each in found] == [(2000.0, 4), (1500.0, 2), (3.0, 1)]
    larger = cli(
        "cache", "import", str(tmp_path / "file"), "--dir", str(tmp_path / "small"), "--disk-gb", "0.001"
    )
    assert "imported 4 blocks" in larger.output
    assert shown(cli, "stat", "--dir", str(tmp_path / "small"))["total_blocks"] == 87
    assert shown(cli, "verify", "--dir", str(tmp_path / "small"))["blocks"] == 11


def test_through_pipes(folder: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "sagellm", "cache"]
    with subprocess.Popen([*program, "export", "-", "--dir", str(folder)], stdout=subprocess.PIPE) as writer:
        into = [*program, "import", "-", "--dir", str(tmp_path / "new")]
        done = subprocess.run(into, stdin=writer.stdout, capture_output=True, text=True, check=True)
    assert "imported 10 blocks" in done.stdout


def test_codecs_travel_as_they_are(cli: Any, folder: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "zstd", codec=CODECS.create("zstd", dtype="float32"))
    make_folder(tmp_path / "int8", codec=CODECS.create("int8", dtype="float32"))
    cli("cache", "export", str(tmp_path / "file"), "--dir", str(tmp_path / "zstd"))
    done = cli("cache", "import", str(tmp_path / "file"), "--dir", str(tmp_path / "new"))
    assert "--set kv.codec=zstd" in done.output
    codec = CODECS.create("zstd", dtype="float32")
    storage = open_disk(tmp_path / "new", 16, block_format=DETAILED, codec=codec)
    blocks = storage.recover()
    assert read(storage, *blocks) == [ReadOutcome.OK] * 10
    storage.close()
    refused = cli("cache", "import", str(tmp_path / "file"), "--dir", str(tmp_path / "int8"))
    assert refused.exit_code == 2
    assert "no server reads both" in refused.output
    mixed = cli("cache", "import", str(tmp_path / "file"), "--dir", str(folder))
    assert mixed.exit_code == 0
    assert shown(cli, "stat", "--dir", str(folder))["codec"] == "zstd"


@pytest.mark.parametrize(
    ("details", "digest", "num_bytes", "message"),
    [
        ({"dtype": "bfloat16"}, b"other weights...", BLOCK_BYTES, "dtype float32, here bfloat16"),
        ({}, b"other weights...", BLOCK_BYTES, "not recorded which"),
        ({}, DETAILED.digest, 2 * BLOCK_BYTES, "blocks of 8,192 bytes, here 16,384"),
    ],
)
def test_another_format_is_refused(
    cli: Any, folder: Path, tmp_path: Path, details: Any, digest: bytes, num_bytes: int, message: str
) -> None:
    cli("cache", "export", str(tmp_path / "file"), "--dir", str(folder))
    make_folder(tmp_path / "other", [], block_format=BlockFormat(digest, num_bytes, details))
    refused = cli("cache", "import", str(tmp_path / "file"), "--dir", str(tmp_path / "other"))
    assert refused.exit_code == 2
    assert message in refused.output
    assert "Import it into a new folder" in refused.output
    assert shown(cli, "stat", "--dir", str(tmp_path / "other"))["blocks"] == 0


def test_a_truncated_file_leaves_the_blocks_before_its_end(cli: Any, folder: Path, tmp_path: Path) -> None:
    cli("cache", "export", str(tmp_path / "file"), "--dir", str(folder))
    os.truncate(tmp_path / "file", 5 * BLOCK_BYTES)
    done = cli("cache", "import", str(tmp_path / "file"), "--dir", str(tmp_path / "new"))
    assert done.exit_code == 2
    assert "ends after 4 whole blocks: export it again" in done.output
    assert shown(cli, "verify", "--dir", str(tmp_path / "new")) == {
        "blocks": 4, "changed": 0, "twins": 0, "bad": {}, "dropped": 0,
    }  # fmt: skip


def test_a_damaged_payload_and_all_behind_it_stay_out(cli: Any, folder: Path, tmp_path: Path) -> None:
    cli("cache", "export", str(tmp_path / "file"), "--dir", str(folder))
    data = bytearray((tmp_path / "file").read_bytes())
    data[data.index(b"sageKVb1") + 512 + 100] ^= 1
    (tmp_path / "file").write_bytes(data)
    done = cli("cache", "import", str(tmp_path / "file"), "--dir", str(tmp_path / "new"))
    assert done.exit_code == 1
    assert "not imported: 1 corrupt" in done.output
    assert "not imported: 5 no prefix" in done.output
    assert shown(cli, "verify", "--dir", str(tmp_path / "new"))["blocks"] == 4


# -- clear


def test_clear_removes_blocks_and_tokens(cli: Any, folder: Path) -> None:
    (folder / "of others").write_text("x")
    assert "add --yes" in cli("cache", "clear", "--dir", str(folder)).output
    assert shown(cli, "stat", "--dir", str(folder))["blocks"] == 10
    done = cli("cache", "clear", "--dir", str(folder), "--yes")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "of others"]
    make_folder(folder)
    assert shown(cli, "stat", "--dir", str(folder))["blocks"] == 10


# -- what is wrong


def of_older_version(folder: Path) -> None:
    change(folder, "UPDATE format SET version = 0")


def no_database(folder: Path) -> None:
    (folder / CATALOGUE_FILE).write_bytes(b"no database" * 1000)


def symlink_for_slab(folder: Path) -> None:
    (folder / SLAB_FILE).rename(folder / "moved")
    (folder / SLAB_FILE).symlink_to(folder / "moved")


def symlink_for_catalogue(folder: Path) -> None:
    (folder / CATALOGUE_FILE).rename(folder / "moved")
    (folder / CATALOGUE_FILE).symlink_to(folder / "moved")


def fifo_for_slab(folder: Path) -> None:
    (folder / SLAB_FILE).unlink()
    os.mkfifo(folder / SLAB_FILE)


def symlink_for_folder(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(folder.with_name("moved"))


WRONG: dict[str, tuple[Damage, str]] = {
    "no folder": (shutil.rmtree, "there is no such folder: name the kv.dir of a server"),
    "empty": (lambda folder: (folder / CATALOGUE_FILE).unlink(), "holds no KV blocks: name the kv.dir"),
    "permissions": (lambda folder: folder.chmod(0o777), "others can write to"),
    "symlink": (symlink_for_folder, "a symlink is not followed: name the folder that it points to"),
    "symlink for slab": (symlink_for_slab, "is a symlink: remove it"),
    "symlink for catalogue": (symlink_for_catalogue, "is a symlink: remove it"),
    "fifo": (fifo_for_slab, "is no regular file"),
    "older version": (of_older_version, "use the sagellm that wrote them, or empty it"),
    "no database": (no_database, "is no catalogue of KV blocks that can be read"),
    "no format": (lambda folder: change(folder, "DELETE FROM format"), "format version none"),
    "other tables": (lambda folder: change(folder, "DROP TABLE blocks"), "no such table: blocks"),
    "format of nonsense": (lambda folder: change(folder, "UPDATE format SET slots = 'x'"), "makes no sense"),
}


@pytest.mark.parametrize(("damage", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("name", ["stat", "ls", "verify", "verify --drop", "export FILE"])
def test_one_line_says_what_would_have_worked(
    cli: Any, folder: Path, tmp_path: Path, name: str, damage: Damage, message: str
) -> None:
    damage(folder)
    arguments = name.replace("FILE", str(tmp_path / "file")).split()
    result = cli("cache", *arguments, "--dir", str(folder))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("name", ["no database", "older version", "other tables", "symlink for slab"])
def test_clear_is_the_way_out(cli: Any, folder: Path, name: str) -> None:
    WRONG[name][0](folder)
    assert cli("cache", "clear", "--dir", str(folder), "--yes").exit_code == 0
    make_folder(folder)
    assert shown(cli, "verify", "--dir", str(folder))["blocks"] == 10


@pytest.mark.parametrize("name", ["no folder", "empty", "permissions", "symlink"])
def test_clear_refuses_what_is_no_folder_of_blocks(cli: Any, folder: Path, name: str) -> None:
    WRONG[name][0](folder)
    result = cli("cache", "clear", "--dir", str(folder), "--yes")
    assert result.exit_code == 2
    assert WRONG[name][1] in result.output


def test_import_refuses(cli: Any, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"

    def refused(*arguments: str) -> str:
        result = cli("cache", "import", *arguments)
        assert result.exit_code == 2, result.output
        assert result.output.count("\n") == 1
        return str(result.output)

    assert "No such file" in refused(str(file), "--dir", str(folder))
    assert "no file of KV blocks" in refused(str(folder / CATALOGUE_FILE), "--dir", str(folder))
    cli("cache", "export", str(file), "--dir", str(folder))
    assert "exists: name a new file" in cli("cache", "export", str(file), "--dir", str(folder)).output
    (tmp_path / "foreign").mkdir(mode=0o700)
    (tmp_path / "foreign" / "thesis.txt").write_text("x")
    assert "holds other files" in refused(str(file), "--dir", str(tmp_path / "foreign"))
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["thesis.txt"]
    assert "holds no block" in refused(str(file), "--dir", str(folder), "--disk-gb", "0.0000001")
    assert "is a symlink" in refused(str(file), "--dir", _with(symlink_for_slab, folder))
    data = file.read_bytes().replace(b'"format_version": 1', b'"format_version": 7')
    file.write_bytes(data)
    assert "format version 7" in refused(str(file), "--dir", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def _with(damage: Damage, folder: Path) -> str:
    damage(folder)
    return str(folder)


def test_a_server_or_a_folder(cli: Any) -> None:
    assert "not both" in cli("cache", "stat", "--url", "http://x", "--dir", "y").output
    assert "name a server" in cli("cache", "clear", "--yes").output
