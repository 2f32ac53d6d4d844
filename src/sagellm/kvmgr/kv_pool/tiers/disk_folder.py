"""`PrivateFolder`: a folder of one user; `OwnedFolder`: one that this process alone uses."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from sagellm.core.config import KVConfig
from sagellm.core.errors import ConfigError

LOCK_FILE = "lock"
_WRITABLE = "name a folder that this user can write to, on a disk that is not read-only"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class PrivateFolder:
    """A folder that is there, held open until `close`. Takes no lock.

    Raises `ConfigError` for one that is missing or a symlink, that belongs to another user, or that others
    can write to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{path}: {_why_not_opened(path, error)}") from error
        try:
            self._check_private()
        except BaseException:
            self.close()
            raise

    def open_to_read(self, name: str) -> int:
        """A descriptor to read a file. Raises as `open`, and `OSError` for a file that is missing."""
        return self._opened(name, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer

    def refuse_symlink(self, name: str) -> None:
        """Raise `ConfigError` if a file that others open by its path is a symlink."""
        if (self.path / name).is_symlink():
            raise ConfigError(_is_symlink(self.path / name))

    def close(self) -> None:
        """A second call changes nothing."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _opened(self, name: str, flags: int) -> int:
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ConfigError(_is_symlink(self.path / name)) from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            os.close(fd)
            raise ConfigError(f"{self.path / name} is no regular file of user {os.geteuid()}: remove it")
        return fd

    def _check_private(self) -> None:
        status = os.fstat(self.fd)
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{self.path} belongs to user {status.st_uid}, and this process is user {os.geteuid()}: "
                f"name a folder of your own, or run `chown {os.geteuid()} {self.path}`"
            )
        if status.st_mode & _WRITABLE_BY_OTHERS:
            raise ConfigError(f"others can write to {self.path}: run `chmod 700 {self.path}`")


def kv_folder(config: KVConfig) -> Path | None:
    """`kv.dir`, with `~` expanded. Raises `ConfigError` for `~` of an unknown user."""
    try:
        return None if config.dir is None else Path(config.dir).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"kv.dir {config.dir}: there is no such user, write the whole path") from error


def check_kv_folder(config: KVConfig) -> None:
    """Raise `ConfigError` for a `kv.dir` that `OwnedFolder` could not use, or without `kv.disk_gb`.

    Makes nothing and takes no lock: another process may have it.
    """
    path = kv_folder(config)
    if path is None:
        return
    if not config.disk_gb:
        raise ConfigError(
            "kv.dir is the folder of the disk tier, and there is none: give its size with kv.disk_gb, or "
            "leave kv.dir out"
        )
    nearest = path
    if os.path.lexists(path):
        PrivateFolder(path).close()
    else:
        nearest = next(each for each in path.absolute().parents if os.path.lexists(each))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: user {os.geteuid()} cannot write to {nearest}: {_WRITABLE}")


class OwnedFolder(PrivateFolder):
    """Holds the lock of a folder from its constructor until `close`.

    The folder is made (mode 0700) if it does not exist. Raises `ConfigError` as `PrivateFolder`, and if
    another process has the lock. The lock belongs to the open file: a child that is forked shares it, and it
    ends with the last of them, also by kill -9.
    """

    def __init__(self, path: Path) -> None:
        self._lock = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path}: {_why_not_opened(path, error)}") from error
        super().__init__(path)
        try:
            self._take_lock()
        except BaseException:
            self.close()
            raise

    def open(self, name: str, flags: int = 0) -> int:
        """A descriptor to read and write a file, made with mode 0600 if needed.

        Raises `ConfigError` for a symlink, a file of another user, and what is no regular file.
        """
        return self._opened(name, flags | os.O_RDWR | os.O_CREAT)

    def close(self) -> None:
        """Let go of the lock. A second call changes nothing."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1
        super().close()

    def _take_lock(self) -> None:
        self._lock = self.open(LOCK_FILE)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(
                f"{self.path} is in use by process {owner}: stop it, or name another folder for this one"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)


def _is_symlink(path: Path) -> str:
    return f"{path} is a symlink: remove it, a file is made here"


def _why_not_opened(path: Path, error: OSError) -> str:
    if path.is_symlink():
        return "a symlink is not followed: name the folder that it points to"
    if error.errno == errno.ENOENT:
        return "there is no such folder: name the kv.dir of a server that has kv.disk_gb"
    return f"{error.strerror}: {_WRITABLE}"
