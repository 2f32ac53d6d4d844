"""Building the kernels: the cache, two builders at once, no compiler, and a build under sanitizers."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sagellm.accel.fusion.cpu import SOURCES, cpu_kernels, library
from sagellm.accel.fusion.cpu.library import compiled
from sagellm.core.errors import KernelError
from sagellm.core.native_code import LEVELS, Compiler, CpuLevel, cache_folder, find_compiler, this_cpu_flags
from sagellm.core.protocols.fusion import KernelSet

PLAIN = LEVELS[-1]


def scripted_compiler(folder: Path, body: str) -> Compiler:
    """A shell script in the compiler's place: `$target` is the file it is to write."""
    script = folder / "fake-g++"
    script.write_text(f"#!/bin/sh\nfor target; do :; done\necho run >> {folder}/runs\n{body}\n")
    script.chmod(0o755)
    return Compiler((str(script),), "fake 1.0")


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def test_built_once_and_again_for_another_compiler(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    compiler = scripted_compiler(tmp_path, 'echo whole > "$target"')
    first = compiled("linear", PLAIN, compiler, folder=cache)
    assert first == compiled("linear", PLAIN, compiler, folder=cache)
    assert runs(tmp_path) == 1
    newer = compiled("linear", PLAIN, Compiler(compiler.command, "fake 1.1"), folder=cache)
    other = compiled("linear", LEVELS[0], compiler, folder=cache)
    attention = compiled("attention", PLAIN, compiler, folder=cache)
    assert len({first, newer, other, attention}) == 4 == runs(tmp_path)
    assert sorted(cache.iterdir()) == sorted([first, newer, other, attention])


def test_builders_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    compiler = scripted_compiler(tmp_path, 'echo half > "$target"; sleep 0.2; echo whole > "$target"')
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: compiled("linear", PLAIN, compiler, folder=cache), range(4)))
    assert len(made) == 1
    assert made.pop().read_text() == "whole\n"
    assert len(list(cache.iterdir())) == 1


def test_what_a_killed_builder_left_is_not_taken(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    compiler = scripted_compiler(tmp_path, 'echo whole > "$target"')
    path = compiled("linear", PLAIN, compiler, folder=cache)
    path.rename(cache / f".{path.name}.killed")
    assert compiled("linear", PLAIN, compiler, folder=cache).read_text() == "whole\n"
    assert runs(tmp_path) == 2


@pytest.mark.parametrize("size", [0, 3, 7])
def test_a_library_that_was_cut_or_changed_is_compiled_again(tmp_path: Path, size: int) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    compiler = scripted_compiler(tmp_path, 'echo whole > "$target"')
    path = compiled("linear", PLAIN, compiler, folder=cache)
    path.write_bytes(b"Whole\n\0"[:size])
    assert compiled("linear", PLAIN, compiler, folder=cache).read_text() == "whole\n"
    assert runs(tmp_path) == 2
    assert compiled("linear", PLAIN, compiler, folder=cache) == path
    assert runs(tmp_path) == 2


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with pytest.raises(KernelError, match=r"fake-g\+\+ failed: broken header"):
        compiled("linear", PLAIN, scripted_compiler(tmp_path, "echo broken header >&2; exit 1"), folder=cache)
    assert not list(cache.iterdir())


def test_without_a_compiler_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert cpu_kernels(2) == KernelSet()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "install g++" in caplog.text
    assert "torch does all" in caplog.text


def test_cxx_is_taken_at_its_word(tmp_path: Path) -> None:
    scripted_compiler(tmp_path, "echo version 7")
    assert find_compiler({"CXX": f"{tmp_path}/fake-g++ --fast"}).command[1:] == ("--fast",)
    with pytest.raises(KernelError, match="no-such-compiler"):
        find_compiler({"CXX": "no-such-compiler", "PATH": os.environ["PATH"]})


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = cache_folder(environ)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(KernelError, match="can be written by, others"):
        cache_folder(environ)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86-64")
def test_every_level_compiles(tmp_path: Path) -> None:
    """Also those that this CPU cannot run."""
    for source in SOURCES:
        for level in LEVELS:
            assert compiled(source, level, find_compiler(), folder=tmp_path).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level in LEVELS if level.cpu_flags <= this_cpu_flags()])
@pytest.mark.parametrize("name", SOURCES)
def test_under_sanitizers(name: str, level: CpuLevel, tmp_path: Path) -> None:
    """Buffers of exact size on the heap: a read or write beside them ends the program."""
    program, check = tmp_path / "check", Path(__file__).parent / f"{name}_check.cpp"
    flags = ["-std=c++20", "-O1", "-g", "-pthread", *level.compiler_flags]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = ["-w", f"-I{Path(library.__file__).parent}", str(check), "-o", str(program)]
    built = [*find_compiler().command, *flags, *sanitizers, *source]
    subprocess.run(built, check=True, capture_output=True, timeout=200)
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compared" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_helpers_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    """Regions of four callers at a time, each task of each done once; helpers of its own in a child."""
    program, check = tmp_path / "check", Path(__file__).parent / "threads_check.cpp"
    flags = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    source = ["-w", f"-I{Path(library.__file__).parent}", str(check), "-o", str(program)]
    built = [*find_compiler().command, *flags, *source]
    subprocess.run(built, check=True, capture_output=True, timeout=200)
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40000 regions" in done.stdout
