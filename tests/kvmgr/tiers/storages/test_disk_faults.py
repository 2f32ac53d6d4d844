"""`DiskStorage` on full, read-only and broken disks, and in unsafe folders."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_tiers import ReadOutcome
from sagellm.kvmgr.kv_pool.tiers.disk import CATALOGUE_FILE
from sagellm.kvmgr.kv_pool.tiers.disk_folder import LOCK_FILE, OwnedFolder
from sagellm.kvmgr.kv_pool.tiers.disk_slab import ALIGNMENT, SLAB_FILE, FreeSpace
from tests.kvmgr.tiers.storages.stored_blocks import (
    BLOCK_BYTES,
    FaultyIO,
    block,
    open_disk,
    read,
    write,
)

OK, ABSENT, IO_ERROR = ReadOutcome.OK, ReadOutcome.ABSENT, ReadOutcome.IO_ERROR
SLOT_BYTES = ALIGNMENT + BLOCK_BYTES
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and give files away")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


# -- faults


@pytest.mark.parametrize("error_number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_failed_write_leaves_nothing_and_ends_the_tier(tmp_path: Path, error_number: int) -> None:
    io = FaultyIO(shorten=True)
    storage = open_disk(tmp_path, io=io)
    storage.recover()
    write(storage, block(0, 0), block(1, 1))
    io.arm(0, error_number)
    with pytest.raises(OSError, match=os.strerror(error_number)):
        write(storage, block(1, 7))
    assert storage.fault is not None
    assert os.strerror(error_number) in storage.fault
    fault = storage.fault
    with pytest.raises(OSError, match="the disk tier is off"):
        write(storage, block(2, 2))
    assert storage.fault == fault
    assert read(storage, block(0, 0), block(1, 1)) == [IO_ERROR] * 2
    storage.touch([0])
    storage.forget([0])
    storage.check()
    storage.close()

    storage = open_disk(tmp_path)
    assert [each.slot for each in storage.recover()] == [0]
    assert read(storage, block(0, 0), block(1, 1), block(1, 7)) == [OK, ABSENT, ABSENT]
    storage.check()
    storage.close()


def test_a_failed_read_is_a_miss_and_ends_the_tier(tmp_path: Path) -> None:
    io = FaultyIO()
    storage = open_disk(tmp_path, io=io)
    storage.recover()
    blocks = [block(slot, slot) for slot in (0, 2, 4, 6)]
    write(storage, *blocks)
    io.arm(0)
    outcomes = read(storage, *blocks)
    assert set(outcomes) <= {IO_ERROR, OK}
    assert IO_ERROR in outcomes
    assert storage.fault
    assert read(storage, *blocks) == [IO_ERROR] * 4
    storage.close()


def test_a_catalogue_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_disk(tmp_path)
    storage.recover()
    write(storage, block(0, 0))
    storage._catalogue._db.execute("PRAGMA query_only = ON")
    with pytest.raises(OSError, match="readonly") as caught:
        write(storage, block(1, 1))
    assert caught.value.errno == errno.EROFS
    assert storage.fault
    assert read(storage, block(1, 1)) == [IO_ERROR]
    storage.close()


def test_a_full_disk(small_disk: Path) -> None:
    storage = open_disk(small_disk / "tier", 40)
    storage.recover()
    write(storage, *(block(slot, slot) for slot in range(4)))
    disk = os.statvfs(small_disk)
    filler = os.open(small_disk / "filler", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(filler, 0, (disk.f_bavail - 8) * disk.f_frsize)
    os.close(filler)
    with pytest.raises(OSError, match=r"full|No space|I/O"):  # noqa: PT012 - the log of the catalogue grows
        for number in range(1000):
            write(storage, block(number % 40, number))
    assert storage.fault
    assert read(storage, block(0, 0)) == [IO_ERROR]
    storage.close()
    (small_disk / "filler").unlink()
    storage = open_disk(small_disk / "tier", 40)
    blocks = storage.recover()
    assert set(read(storage, *blocks)) <= {OK}
    storage.check()
    storage.close()


def test_preallocation_keeps_space_free(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = open_disk(small_disk / "tier", 1000, space=FreeSpace(512 << 10, 0.1))
    assert 1 < storage.num_slots <= (512 << 10) // SLOT_BYTES
    assert "of 1000 blocks" in caplog.text
    disk = os.statvfs(small_disk)
    assert disk.f_bavail * disk.f_frsize >= 400 << 10  # the catalogue has taken some
    num_slots = storage.num_slots
    storage.close()
    storage = open_disk(small_disk / "tier", 1000, space=FreeSpace(512 << 10))
    assert num_slots - 8 <= storage.num_slots <= num_slots
    storage.close()
    with pytest.raises(ConfigError, match=r"no room for one block .* keep less"):
        open_disk(small_disk / "other", 1000, space=FreeSpace(2 << 20))


def test_a_sparse_slab_keeps_space_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    free = [1 << 40]
    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    monkeypatch.setattr(FreeSpace, "usable", lambda self, fd: free[0])
    storage = open_disk(tmp_path)
    storage.recover()
    assert "preallocates no space" in caplog.text
    assert (tmp_path / SLAB_FILE).stat().st_size == 16 * SLOT_BYTES
    write(storage, block(0, 0))
    free[0] = 100
    with pytest.raises(OSError, match="free space"):
        write(storage, block(1, 1))
    storage.close()


@pytest.mark.parametrize("disk", ["small_disk", "tmp_path"])
def test_without_direct_io(disk: str, request: pytest.FixtureRequest) -> None:
    """On tmpfs, which may have none, and where the first direct read is refused."""

    class Refusing(FaultyIO):
        def preadv(self, fd: int, buffers, offset: int, /) -> int:  # type: ignore[no-untyped-def]
            if _is_direct(fd):
                raise OSError(errno.EINVAL, "no direct I/O")
            return super().preadv(fd, buffers, offset)

    folder: Path = request.getfixturevalue(disk)
    storage = open_disk(folder / "tier", 8, io=Refusing())
    storage.recover()
    assert not storage._slab.is_direct
    write(storage, block(0, 0), block(1, 1))
    assert read(storage, block(1, 1), block(0, 0)) == [OK, OK]
    storage.check()
    storage.close()


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for a full disk where nothing can be mounted."""
    script = f"""
    import resource
    from pathlib import Path
    from sagellm.core.errors import ConfigError
    from tests.kvmgr.tiers.storages.stored_blocks import block, open_disk, read, write
    storage = open_disk(Path({str(tmp_path / "tier")!r}))
    storage.recover()
    write(storage, block(0, 0), block(15, 15))
    resource.setrlimit(resource.RLIMIT_FSIZE, ({4 * SLOT_BYTES}, resource.RLIM_INFINITY))
    try:
        write(storage, block(12, 12))
    except OSError as error:
        print(error.errno, bool(storage.fault), [each.name for each in read(storage, block(0, 0))])
    storage.close()
    try:
        open_disk(Path({str(tmp_path / "other")!r}))
    except ConfigError as error:
        print("other" in str(error) and "disk with room" in str(error))
    """
    lines = _python(script)
    assert lines == [f"{errno.EFBIG} True ['IO_ERROR']", "True"]
    storage = open_disk(tmp_path / "tier")
    assert {each.slot for each in storage.recover()} == {0, 15}
    assert read(storage, block(0, 0), block(15, 15)) == [OK] * 2
    storage.close()


# -- folders


def test_what_is_made_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tier"
    storage = open_disk(folder)
    storage.recover()
    write(storage, block(0, 0))
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert {LOCK_FILE, SLAB_FILE, CATALOGUE_FILE, f"{CATALOGUE_FILE}-wal"} <= modes.keys()
    assert set(modes.values()) == {0o600}
    storage.close()


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"others can write to .* run `chmod 700 {tmp_path}`"):
        open_disk(tmp_path)
    tmp_path.chmod(0o700)
    open_disk(tmp_path).close()


@needs_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(ConfigError, match=r"belongs to user 12345.*chown 0"):
        open_disk(tmp_path)


@needs_root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / SLAB_FILE).touch()
    os.chown(tmp_path / SLAB_FILE, 12345, 12345)
    with pytest.raises(ConfigError, match="no regular file of user 0: remove it"):
        open_disk(tmp_path)


def test_symlinks_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(ConfigError, match="name the folder that it points to"):
        open_disk(tmp_path / "link")
    for name in (LOCK_FILE, SLAB_FILE, CATALOGUE_FILE, f"{CATALOGUE_FILE}-wal", f"{CATALOGUE_FILE}-shm"):
        (real / name).unlink(missing_ok=True)
        target = tmp_path / f"target of {name}"
        (real / name).symlink_to(target)
        with pytest.raises(ConfigError, match=f"{name} is a symlink: remove it"):
            open_disk(real)
        assert not target.exists()
        (real / name).unlink()
    open_disk(real).close()


def test_a_pipe_is_no_slab(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SLAB_FILE)
    with pytest.raises(ConfigError, match=r"no regular file|cannot hold KV blocks"):
        open_disk(tmp_path)


@pytest.mark.parametrize("name", ["file", "file/tier"])
def test_a_path_that_is_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name a folder that this user can write to"):
        open_disk(tmp_path / name)


def test_permission_denied(tmp_path: Path) -> None:
    user = os.geteuid()
    tmp_path.chmod(0o500)
    if user == 0:  # root may write everywhere; another user may not
        os.chown(tmp_path, 65534, -1)
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match=r"Permission denied.*can write to"):
            open_disk(tmp_path / "tier")
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def test_permission_denied_when_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: OwnedFolder, name: str, flags: int = 0) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    monkeypatch.setattr(OwnedFolder, "open", denied)
    with pytest.raises(OSError):
        OwnedFolder(tmp_path)
    with pytest.raises(ConfigError, match=r"Permission denied.*can write to"):
        open_disk(tmp_path)


def test_a_read_only_disk(small_disk: Path) -> None:
    storage = open_disk(small_disk / "tier", 8)
    storage.recover()
    write(storage, block(0, 0))
    storage.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ConfigError, match=r"Read-only file system.*can write to"):
        open_disk(small_disk / "tier", 8)


def test_one_process_owns_a_folder(tmp_path: Path) -> None:
    script = f"""
    from pathlib import Path
    from sagellm.core.errors import ConfigError
    from tests.kvmgr.tiers.storages.stored_blocks import open_disk
    try:
        open_disk(Path({str(tmp_path)!r})).close()
        print("opened")
    except ConfigError as error:
        print(error)
    """
    storage = open_disk(tmp_path)
    [error] = _python(script)
    assert error.startswith(f"{tmp_path} is in use by process {os.getpid()}: stop it")
    storage.close()
    assert _python(script) == ["opened"]
    open_disk(tmp_path).close()


def _python(script: str) -> list[str]:
    """The lines that a script prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()
