"""A plug-in is one new file: found, imported alone, made with checked options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sagellm.core import registry as registry_module
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.protocols.collectives import CommBackendProtocol, RankGroup
from sagellm.core.protocols.interconnect import DomesticCommBackend
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.registry import KINDS, Registry, members, registry

LRU = """
class Lru:
    def __init__(self, capacity=4, *, ghosts=False):
        self.capacity = capacity
        self.ghosts = ghosts

PLUGIN = Lru
"""
BROKEN = "PLUGIN = None\nraise RuntimeError('imported')\n"
NEEDY = "class Needy:\n    def __init__(self, clock): self.clock = clock\n\nPLUGIN: type = Needy\n"
OPEN = "def make(**options): return options\n\nPLUGIN = make\n"


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[object]]:
    package = tmp_path / "plugs_for_test"
    (package / "folder").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "lru": LRU,
        "broken": BROKEN,
        "needy": NEEDY,
        "open_ended": OPEN,
        "_shared": "PLUGIN = int\n",
        "matcher": "MATCHER = 1\n",
        "folder/__init__": "class F: ...\n\nPLUGIN = F\n",
    }.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield Registry("policy", "plugs_for_test", "sagellm.test_group")
    for module in [name for name in sys.modules if name.startswith("plugs_for_test")]:
        del sys.modules[module]


def test_names_are_files_with_a_plugin_line(policies: Registry[object]) -> None:
    assert policies.names() == ["broken", "folder", "lru", "needy", "open_ended"]


def test_listing_imports_no_plugin(policies: Registry[object]) -> None:
    policies.names()
    assert not [name for name in sys.modules if name.startswith("plugs_for_test.")]


def test_getting_one_imports_that_file_only(policies: Registry[object]) -> None:
    assert policies.get("lru").__name__ == "Lru"
    assert [name for name in sys.modules if name.startswith("plugs_for_test.")] == ["plugs_for_test.lru"]


def test_a_failing_import_is_not_hidden(policies: Registry[object]) -> None:
    with pytest.raises(RuntimeError, match="imported"):
        policies.get("broken")


def test_a_new_file_is_found_at_once(policies: Registry[object], tmp_path: Path) -> None:
    (tmp_path / "plugs_for_test" / "fresh.py").write_text("class Fresh: ...\n\nPLUGIN = Fresh\n")
    assert type(policies.create("fresh")).__name__ == "Fresh"


def test_create_passes_options(policies: Registry[object]) -> None:
    made = policies.create("lru", capacity=9, ghosts=True)
    assert (made.capacity, made.ghosts) == (9, True)  # type: ignore[attr-defined]
    assert list(policies.options("lru")) == ["capacity", "ghosts"]


def test_an_unknown_option_is_answered_with_the_parameters(policies: Registry[object]) -> None:
    with pytest.raises(UnknownNameError, match=r"'lru' has no option 'size'; it takes capacity, ghosts\."):
        policies.create("lru", size=3)


def test_a_missing_option_is_answered_with_its_name(policies: Registry[object]) -> None:
    with pytest.raises(ConfigError, match=r"'needy' needs clock; it takes clock\."):
        policies.create("needy")


def test_a_factory_with_open_options_takes_all(policies: Registry[object]) -> None:
    assert policies.create("open_ended", a=1) == {"a": 1}


@pytest.mark.parametrize("name", ["lruu", "_shared", "matcher"])
def test_an_unknown_name_is_answered_with_the_list(policies: Registry[object], name: str) -> None:
    with pytest.raises(UnknownNameError, match=r"Known: broken, folder, lru, needy, open_ended\."):
        policies.get(name)


def test_an_unknown_name_is_answered_with_the_nearest(policies: Registry[object]) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'lru'"):
        policies.get("lruu")


def test_a_path_reaches_a_class_outside(policies: Registry[object]) -> None:
    assert policies.create("argparse:Namespace", a=1) == argparse.Namespace(a=1)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:X", "there is no module 'no_such_module'"),
        ("no.such.module:X", "there is no module 'no.such.module'"),
        (":X", "there is no module ''"),
        ("collections:OrderdDict", "Did you mean 'OrderedDict'"),
    ],
)
def test_a_wrong_path_says_what_is_missing(policies: Registry[object], path: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        policies.get(path)


def test_entry_points_add_names_and_replace_none(
    policies: Registry[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = "sagellm.test_group"
    found = [EntryPoint("theirs", "argparse:Namespace", group), EntryPoint("lru", "builtins:list", group)]
    monkeypatch.setattr(registry_module, "entry_points", lambda *, group: found)
    assert "theirs" in policies.names()
    assert policies.create("theirs") == argparse.Namespace()
    assert policies.get("lru").__name__ == "Lru"


def test_a_package_that_is_not_there_has_no_names() -> None:
    empty: Registry[object] = Registry("thing", "sagellm.core.no_such_package")
    assert empty.names() == []
    with pytest.raises(UnknownNameError, match="Known: none"):
        empty.get("x")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_registry(kind: str) -> None:
    assert registry(kind).kind == kind
    assert registry(kind).entry_point_group == KINDS[kind][1]


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'policy'"):
        registry("polici")


def test_our_policies_are_found() -> None:
    assert "lru" in registry("policy").names()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "os:getcwd",
            r"policy 'os:getcwd' makes a str, which has no check, evict, .*: it is no EvictionPolicy",
        ),
        ("collections:Counter", r"makes a Counter, which has no check, evict"),
        ("os:environ", r"policy 'os:environ' is a _Environ: name a class or a function"),
        ("builtins:dict", r"policy 'builtins:dict' does not say which options it takes"),
        ("math:sqrt", r"policy 'math:sqrt' needs x"),
    ],
)
def test_a_path_of_the_wrong_kind_says_what_is_missing(path: str, message: str) -> None:
    with pytest.raises((UnknownNameError, ConfigError), match=message):
        registry("policy").create(path)


def test_members_are_those_of_the_protocol_and_its_bases() -> None:
    assert members(SchedulerPass) == ["__call__", "name"]
    assert {"info", "is_available"} < set(members(DomesticCommBackend))
    assert set(members(CommBackendProtocol)) < set(members(RankGroup))
    assert members(None) == []


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"trace_format"}))
def test_every_contract_has_members(kind: str) -> None:
    assert members(KINDS[kind][2])
