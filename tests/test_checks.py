"""The checks of `make check` refuse what they say they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_docs
import check_sizes
import config_table


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = tmp_path / "src" / "sagellm" / "accel" / "fusion"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text('"""Fine."""\n')
    (module / "README.md").write_text("# fusion\n")
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    return tmp_path


def test_a_clean_tree_passes(tree: Path) -> None:
    assert check_sizes.main(tree) == 0
    assert check_docs.main(write=False) == 0


@pytest.mark.parametrize(
    ("path", "text", "breach"),
    [
        ("src/sagellm/long.py", "x = 1\n" * 601, "601 lines, at most 600"),
        ("src/sagellm/utils.py", "x = 1\n", "the name says nothing"),
        ("src/sagellm/helpers/x.py", "x = 1\n", "the name says nothing"),
        ("src/sagellm/open.py", "x = 1  # TO" + "DO later\n", "open.py:1"),
        ("tools/open.py", "raise NotImplemented" + "Error\n", "open.py:1"),
        ("src/sagellm/f.py", "def f():\n" + "    x = 1\n" * 60, "61 lines, at most 60"),
        ("src/sagellm/comm/overlap/__init__.py", "", "no README.md"),
        ("src/sagellm/accel/fusion/README.md", "x\n" * 61, "61 lines, at most 60"),
        ("docs/decisions/0001-x.md", "x\n" * 41, "41 lines, at most 40"),
        ("docs/decisions/first.md", "x\n", "named NNNN-title.md"),
    ],
)
def test_sizes_and_names(
    tree: Path, capsys: pytest.CaptureFixture[str], path: str, text: str, breach: str
) -> None:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text)
    assert check_sizes.main(tree) == 1
    assert breach in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "text", "breach"),
    [
        ("docs/x.md", "[gone](gone.md)\n", "links to gone.md"),
        ("docs/x.md", "see /ho" + "me/me/x\n", "a path of one machine"),
        ("tools/x.sh", "pip install -i https://pypi" + ".org/simple x\n", "a package registry"),
        ("README.md", "http://localhost:" + "9123/v1\n", "a port number"),
        ("src/sagellm/x.py", "PORT = 80" + "00\n", "is SagePorts.HTTP"),
        (
            "docs/x.md",
            "<!-- output of: sagellm version -->\n```text\nold\n```\n",
            "not the program's any more",
        ),
    ],
)
def test_documents(tree: Path, capsys: pytest.CaptureFixture[str], path: str, text: str, breach: str) -> None:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text)
    assert check_docs.main(write=False) == 1
    assert breach in capsys.readouterr().out


def test_links_that_hold_are_fine(tree: Path) -> None:
    code = "```\n[not a link](nowhere)\n```\n"
    (tree / "x.md").write_text(f"[a](src/sagellm) [b](https://example.com) [c](#part)\n{code}")
    assert check_docs.main(write=False) == 0


def test_write_puts_the_output_in(tree: Path) -> None:
    document = tree / "x.md"
    document.write_text("<!-- output of: sagellm version -->\n```text\n```\nend\n")
    assert check_docs.main(write=True) == 0
    assert document.read_text().startswith("<!-- output of: sagellm version -->\n```text\nsagellm 0.")
    assert document.read_text().endswith("```\nend\n")
    assert check_docs.main(write=False) == 0


def test_only_our_own_output_is_shown(tree: Path) -> None:
    (tree / "x.md").write_text("<!-- output of: rm -r x -->\n```text\n```\n")
    with pytest.raises(ValueError, match="only sagellm's own output"):
        check_docs.main(write=True)


def test_keys_of_the_configuration_are_a_table() -> None:
    group = config_table.table("fleet.groups.NAME")
    assert "| type | general | general, prefilling, decoding or hybrid |" in group
    assert "| url | (needed) |" in config_table.table("fleet.groups.NAME.servers")
    assert "| heartbeat_s | 0.25 |" in config_table.table("fleet")
    with pytest.raises(ValueError, match="no section"):
        config_table.table("fleet.heartbeat_s")
