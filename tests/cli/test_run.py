"""`sagellm run`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sagellm.cli.commands import app
from sagellm.core.errors import ModelError
from sagellm.core.protocols.cot import EarlyExit, SpeculativeReasoning
from sagellm.engines import build
from sagellm.engines.native import DEMO_MODEL


def test_the_answer_alone_goes_to_stdout(cli: Any, made: Any) -> None:
    result = cli("run", "one two three")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "three two one \n", "")
    assert made[0].asked[0][0] == [{"role": "user", "content": "one two three"}]
    assert made[0].closed


def test_without_a_prompt_it_reads_stdin(cli: Any, made: Any) -> None:
    assert cli("run", stdin="a b\n").stdout == "b a \n"
    assert cli("run", "-", stdin="c d\n").stdout == "d c \n"
    assert len(made) == 2


def test_a_stdin_that_is_no_text_is_one_line(made: Any) -> None:
    result = CliRunner().invoke(app, ["run", "-"], input=b"\xff\xfe", catch_exceptions=False)
    assert result.exit_code == 2
    assert result.stderr.startswith("sagellm: stdin holds no utf-8 text")
    assert result.stderr.count("\n") == 1
    assert not made


def test_options_reach_sampling_and_configuration(cli: Any, made: Any) -> None:
    options = ["--max-tokens", "5", "--temperature", "0", "--seed", "3", "--stop", "x", "--stop", "y"]
    settings = [
        "--model",
        "some/folder",
        "--block-size",
        "32",
        "--set",
        "kv.num_blocks=9",
        "--preset",
        "laptop",
    ]
    assert cli("run", "hello", *options, *settings).exit_code == 0
    params = made[0].asked[0][1].params
    assert (params.max_tokens, params.temperature, params.seed, params.stop) == (5, 0.0, 3, ("x", "y"))
    config = made[0].config
    assert (config.model.name, config.kv.block_size, config.kv.num_blocks) == ("some/folder", 32, 9)
    assert config.scheduler.max_num_seqs == 8


def test_options_of_reasoning_reach_the_request(cli: Any, made: Any) -> None:
    soft = ("--soft-reasoning-tokens", "9", "--soft-reasoning-slope", "0.5")
    kinds = ("--early-exit", "0.7"), ("--speculative-reasoning", "8.5"), ()
    for options in kinds:
        assert cli("run", "hello", *soft, *options).exit_code == 0
    leaves, drafts, neither = (each.asked[0][1] for each in made)
    assert (neither.params.soft_reasoning_tokens, neither.params.soft_reasoning_slope) == (9, 0.5)
    assert (leaves.early_exit, leaves.speculative_reasoning) == (EarlyExit(0.7), None)
    assert (drafts.early_exit, drafts.speculative_reasoning) == (None, SpeculativeReasoning(8.5))
    assert (neither.early_exit, neither.speculative_reasoning) == (None, None)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--early-exit", "threshold must be above 0"),
        ("--speculative-reasoning", "threshold must be in [0, 9]"),
    ],
)
def test_a_wrong_threshold_is_one_line(cli: Any, made: Any, option: str, said: str) -> None:
    result = cli("run", "hello", option, "-1")
    assert result.exit_code == 2
    assert said in result.stderr


def test_what_is_not_given_stays_with_the_model(cli: Any, made: Any) -> None:
    cli("run", "x", "--top-k", "4")
    assert made[0].given == {"top_k": 4}


def test_system_and_raw(cli: Any, made: Any) -> None:
    cli("run", "hi", "--system", "be brief")
    assert made[0].asked[0][0][0] == {"role": "system", "content": "be brief"}
    cli("run", "hi", "--raw")
    assert made[1].asked[0][0] == "hi"
    refused = cli("run", "hi", "--raw", "--system", "x")
    assert refused.exit_code == 2
    assert "--raw has no system message" in refused.stderr


def test_stats_go_to_stderr(cli: Any, made: Any) -> None:
    result = cli("run", "one two", "--stats")
    assert result.stdout == "two one \n"
    assert result.stderr == "7 prompt tokens (4 cached), 2 generated\n"


@pytest.mark.parametrize("method", ["heads", "self_draft"])
def test_speculation_shows_its_gain_on_stderr(method: str, cli: Any) -> None:
    question = "Repeat: fox, owl, bear, table, chair, window"
    plain = cli("run", question)
    keys = ("-s", "speculative.adaptive=false")
    result = cli("run", question, "--speculative", method, *keys)
    assert result.stdout == plain.stdout
    assert plain.stderr == ""
    shown = r"(\d\.\d\d) tokens a step, (\d+)% of \d+ proposed tokens accepted, \d+\.\d tokens/s\n"
    found = re.search(shown, result.stderr)
    assert found is not None
    assert float(found[1]) > 1.5
    assert int(found[2]) > 40


def test_an_error_is_one_line_and_exit_2(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Any, *, progress: Any, events: Any = None) -> None:
        raise ModelError("the folder\nis empty")

    monkeypatch.setattr(build, "build_llm", fail)
    result = cli("run", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "sagellm: the folder is empty\n"
    with pytest.raises(ModelError):
        cli("run", "x", "--debug")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--set", "kv.blok_size=3"],
            "unknown key 'kv.blok_size' in command line. Did you mean 'kv.block_size'?",
        ),
        (["--set", "kv.block_size"], "write KEY=VALUE"),
        (["--block-size", "zero"], "kv.block_size = 'zero' (command line)"),
        (["--preset", "big"], "unknown preset 'big'"),
        (["--config", "no/such/file.yaml"], "cannot read the configuration file no/such/file.yaml"),
    ],
)
def test_wrong_settings_say_what_would_have_worked(
    cli: Any, made: Any, arguments: list[str], message: str
) -> None:
    result = cli("run", "x", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not made


def test_a_request_that_fails_on_the_way_is_an_error(cli: Any, made: Any) -> None:
    made.behaviour = {"error": "the pool is too small"}
    result = cli("run", "x")
    assert result.exit_code == 2
    assert "the pool is too small" in result.stderr
    assert made[0].closed


def test_ctrl_c_ends_with_130(cli: Any, made: Any) -> None:
    made.behaviour = {"interrupt_after": 1}
    result = cli("run", "one two three")
    assert (result.exit_code, result.stdout) == (130, "three \n")
    assert made[0].closed


def without_template(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "chat_template"}))
    return folder


def test_a_model_without_chat_template_names_the_options_that_help(cli: Any, tmp_path: Path) -> None:
    folder = without_template(tmp_path)
    run = ("run", "hi", "-m", str(folder), "--max-tokens", "2", "--num-blocks", "8")
    refused = cli(*run)
    assert refused.exit_code == 2
    assert "give one with --chat-template FILE" in refused.stderr
    assert "--raw" in refused.stderr
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for option in ("--raw", f"--chat-template={tmp_path / 'plain.jinja'}"):
        assert cli(*run, option).exit_code == 0
    wrong = cli(*run, "--chat-template", str(tmp_path / "none.jinja"))
    assert wrong.exit_code == 2
    assert "none.jinja cannot be read (No such file or directory): give a Jinja file" in wrong.stderr
