"""`sagellm doctor`: what is here, what is missing, what would fit."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sagellm.cli import doctor
from sagellm.cli._loading import as_text
from sagellm.cli._settings import Settings
from sagellm.cli.doctor import LocalDevice, devices, read_meminfo
from sagellm.comm.interconnect.ascend import Ascend
from sagellm.comm.interconnect.vendor import VendorInterconnect
from sagellm.comm.topology.manager import SystemTopology, read_recorded
from sagellm.core.extras import EXTRA_OF, install_command
from sagellm.core.native_code import cache_folder
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.footprint import footprint
from sagellm.engines.native.parallel.split import Split
from tests.accel.quantization.checkpoints import KINDS
from tests.comm.interconnect.emulated_vendor import FREE_BYTES, NUM_DEVICES, EmulatedVendor
from tests.comm.topology.recorded import gpus, spaced_matrix
from tests.engines.native.test_quantized_checkpoints import save_pair
from tests.tiny_models import save_tiny
from tests.toy_tokenizers import byte_level


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the demo model, whose own weights take longer to check."""
    folder = tmp_path / "tiny"
    save_tiny(folder, "llama-head80-tied")
    byte_level().save(str(folder / "tokenizer.json"))
    monkeypatch.setattr(doctor, "DEMO_MODEL", folder)
    return folder


def _save_pair(folder: Path) -> None:
    save_pair(folder, KINDS["awq"])
    for one in ("plain", "quantized"):
        byte_level().save(str(folder / one / "tokenizer.json"))


def test_a_whole_installation_exits_0(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cli("doctor", "--port", "0")
    assert result.exit_code == 0, result.stdout
    assert result.stdout.endswith("ready to serve\n")
    assert "0.3 M parameters" in result.stdout
    assert "3840 bytes of KV per token" in result.stdout


@pytest.mark.parametrize("package", ["torch", "fastapi"])
def test_a_missing_package_exits_1_and_says_what_to_install(
    cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(doctor, "_version_of", lambda name: None if name == package else "1.0")
    result = cli("doctor", "--port", "0")
    assert result.exit_code == 1
    assert (
        f"cannot serve: missing {package}; {install_command(EXTRA_OF.get(doctor.REQUIRED[package], ''))}"
        in result.stdout
    )


@pytest.mark.parametrize("package", ["numpy", "torch", "PyYAML"])
@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("no such module"), OSError("libc10.so:\nno such file")]
)
def test_a_package_that_cannot_be_imported_is_missing(
    cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch, package: str, error: Exception
) -> None:
    real = importlib.import_module

    def broken(name: str) -> ModuleType:
        if name == {"PyYAML": "yaml"}.get(package, package):
            raise error
        return real(name)

    def not_reached(*_: object, **__: object) -> None:
        raise AssertionError("the configuration needs packages that are not there")

    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setattr(Settings, "load", not_reached)
    result = cli("doctor", "--port", "0")
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit)
    assert f"cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})" in result.stdout
    assert (
        f"cannot serve: missing {package}; {install_command(EXTRA_OF.get(doctor.REQUIRED[package], ''))}"
        in result.stdout
    )


def test_a_missing_demo_model_exits_1(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEMO_MODEL", tmp_path)
    result = cli("doctor", "--port", "0")
    assert result.exit_code == 1
    assert "missing the demo model" in result.stdout


def test_a_taken_port_is_said_and_is_no_failure(
    cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = cli("doctor", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 0
    assert "choose another with --host and --port" in result.stdout


@pytest.mark.parametrize("host", ["no such host", "x" * 300])
def test_a_host_that_is_none_is_said(
    cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    assert "choose another with --host" in cli("doctor", "--host", host).stdout


@pytest.mark.parametrize("name", ["/nonexistent", "./here", "a/b/c", "~/nowhere", ""])
def test_a_model_that_is_none_exits_2(
    cli: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    result = cli("doctor", name or str(empty), "--port", "0")
    assert (result.exit_code, "ready" in result.stdout) == (2, False)
    assert result.stderr.startswith(f"sagellm: cannot serve {name or empty}: ")
    assert result.stderr.count("\n") == 1


def test_the_model_may_be_an_option(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = [LocalDevice("cpu", "a processor", 8 << 30, 4 << 30)]  # free memory changes between two calls
    monkeypatch.setattr(doctor, "devices", lambda *, has_torch: machine)
    named, alone = (cli("doctor", *given, "--port", "0") for given in (("-m", str(model)), (str(model),)))
    assert named.exit_code == 0
    assert named.stdout.splitlines()[-4:] == alone.stdout.splitlines()[-4:]


def test_a_folder_of_the_home_is_found_as_serve_finds_it(
    cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder().parent.parent))  # kernels are built once
    monkeypatch.setenv("HOME", str(model.parent))
    result = cli("doctor", f"~/{model.name}", "--port", "0")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith("ready to serve\n")


def test_a_model_of_the_hub_may_come(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = cli("doctor", "Qwen/Qwen3-0.6B", "--port", "0")
    assert told.exit_code == 0
    assert "sagellm pull Qwen/Qwen3-0.6B fetches it" in told.stdout
    assert "ready to serve" not in told.stdout
    told = cli("doctor", "Qwen/Qwen3-0.6B", "--port", "0", "--offline")
    assert told.exit_code == 2


def test_what_fits_counts_tokens_in_the_share(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = footprint(model)
    free = size.weight_bytes + 6000 * size.kv_bytes_per_token
    monkeypatch.setattr(doctor, "devices", lambda **_: [LocalDevice("cpu", "a CPU", 2 * free, free)])
    told = cli("doctor", "--port", "0", "--set", "engine.kernels=off").stdout
    assert "3840 bytes of KV per token: 1488 tokens, 5.7 MB of 5.8 MB (25% of what is free)" in told
    assert "room for 2 requests of 512 tokens at once" in told
    told = cli("doctor", "--port", "0", "--num-blocks", "3").stdout
    assert "48 tokens" in told
    assert "room for one request of at most 48 of the 512 tokens that the model takes" in told
    assert (
        "256 tokens"
        in cli("doctor", "--port", "0", "--set", "scheduler.max_num_seqs=1", "--max-model-len", "256").stdout
    )
    small = [LocalDevice("cpu", "a CPU", 10, 10)]
    monkeypatch.setattr(doctor, "devices", lambda **_: small)
    told = cli("doctor", "--port", "0")
    assert (told.exit_code, "ready to serve" in told.stdout) == (2, False)
    assert "does not fit: 0 bytes for the KV cache hold no block" in told.stdout
    assert told.stderr.startswith("sagellm: cannot serve the demo model: 0 bytes")


@pytest.mark.usefixtures("model")
def test_groups_of_layers_and_their_padding_are_told(cli: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma4-wide-windows")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    told = cli("doctor", "-m", str(tmp_path), "--port", "0")
    assert told.exit_code == 0
    [line] = [line.strip() for line in told.stdout.splitlines() if "KV groups" in line]
    assert line == (
        "4 KV groups of 2 to 3 layers: 1 for all tokens, 3 for windows of 13 tokens; a token behind "
        "these keeps 2048 bytes; padding: 896 of 8192 bytes per token"
    )


@pytest.mark.usefixtures("model")
def test_layers_with_chunks_are_told(cli: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama4-dense-first")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    told = cli("doctor", "-m", str(tmp_path), "--port", "0")
    assert told.exit_code == 0
    assert "3 KV groups of 2 layers: 1 for all tokens, 2 for chunks of 32 tokens" in told.stdout


@pytest.mark.usefixtures("model")
def test_a_quantized_checkpoint_is_told_by_what_it_means(cli: Any, tmp_path: Path) -> None:
    _save_pair(tmp_path)
    plain, quantized = (cli("doctor", str(tmp_path / one), "--port", "0") for one in ("plain", "quantized"))
    assert (plain.exit_code, quantized.exit_code) == (0, 0)
    [count] = re.findall(r"plain: (.* M parameters), .* as float32\n", plain.stdout)
    assert f"quantized: {count}, " in quantized.stdout
    assert "as awq (4 bits by groups of 32), all else float32" in quantized.stdout


@pytest.mark.usefixtures("model")
def test_a_checkpoint_that_is_held_dequantized_says_why(cli: Any, tmp_path: Path) -> None:
    _save_pair(tmp_path)
    told = cli("doctor", str(tmp_path / "quantized"), "--port", "0", "--set", "engine.kernels=off").stdout
    assert "held dequantized, in part or whole: there is no kernel for it on this device" in told


@pytest.mark.usefixtures("model")
def test_the_setting_is_told(cli: Any) -> None:
    told = cli("doctor", "--quant", "int4", "--port", "0").stdout
    assert "as int4 (4 bits by groups of 32, 8 bits by groups of 32), all else float32" in told


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"quant_method": "bitsandbytes"}, ()),
    ({"quant_method": "gptq", "bits": 3}, ()),
    (KINDS["awq"].config, ("--quant", "int8")),
    (KINDS["awq"].config | {"group_size": 16}, ()),
]


@pytest.mark.usefixtures("model")
def test_what_auto_takes_is_told(cli: Any, model: Path) -> None:
    auto = "-s", "speculative.method=auto"
    assert "speculative.method auto: heads" in cli("doctor", str(DEMO_MODEL), *auto).stdout
    assert "speculative.method auto: suffix" in cli("doctor", str(model), *auto).stdout
    assert "speculative.method" not in cli("doctor", str(model)).stdout


def test_a_draft_of_the_model_itself_is_counted(cli: Any) -> None:
    own = "-s", "speculative.method=self_draft", "-s", "kv.memory_fraction=0.0001"
    some, none = 'speculative.method_options={"layers": 2}', "speculative.method=none"
    some_layers = cli("doctor", str(DEMO_MODEL), *own, "-s", some).stdout
    assert "self_draft: 1024 bytes of KV per token beside the model's, no copies of weights" in some_layers
    quantized = cli("doctor", str(DEMO_MODEL), *own).stdout
    assert re.search(
        r"2560 bytes of KV per token beside the model's, copies of weights: \d+\.\d kB", quantized
    )
    alone = cli("doctor", str(DEMO_MODEL), *own, "-s", none).stdout
    tokens = [int(re.findall(r"(\d+) tokens, ", told)[0]) for told in (alone, some_layers, quantized)]
    assert tokens[0] > 1.3 * tokens[1] > 1.3 * tokens[2], tokens


def test_a_model_that_goes_with_no_tier_is_refused(cli: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mistral"
    save_tiny(folder, "mistral-window")
    byte_level().save(str(folder / "tokenizer.json"))
    told, served = (
        cli(name, str(folder), "--port", "0", "--kv-host-gb", "0.1") for name in ("doctor", "serve")
    )
    assert "sliding windows" in told.stderr
    assert served.stderr.splitlines()[-1].removeprefix("sagellm: ") in told.stderr
    assert cli("doctor", str(folder), "--port", "0").exit_code == 0


def test_tokens_of_tiers_are_told(cli: Any, model: Path, tmp_path: Path) -> None:
    sizes = ("--kv-host-gb", "0.5", "--kv-disk-gb", "0.25", "--kv-dir", str(tmp_path / "kv"))
    told = cli("doctor", str(model), "--port", "0", "--num-blocks", "64", *sizes).stdout
    [per_token] = re.findall(r"(\d+) bytes of KV per token", told)
    assert f"host memory: KV of {2**29 // int(per_token)} tokens in 0.5 GiB\n" in told
    assert f"disk: KV of {2**28 // int(per_token)} tokens in 0.25 GiB\n" in told
    assert not (tmp_path / "kv").exists()
    told = cli("doctor", str(model), "--port", "0", "--kv-host-gb", "0.0001").stdout
    assert "hardly more than the pool" in told


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(("config", "options"), REFUSED)
def test_what_serve_refuses_is_refused_in_the_same_words(
    cli: Any, tmp_path: Path, config: dict[str, Any], options: tuple[str, ...]
) -> None:
    _save_pair(tmp_path)
    folder = tmp_path / "quantized"
    plain = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(plain | {"quantization_config": config}))
    told, served = (cli(name, str(folder), "--port", "0", *options) for name in ("doctor", "serve"))
    assert (told.exit_code, served.exit_code) == (2, 2)
    words = served.stderr.splitlines()[-1].removeprefix("sagellm: ")
    assert told.stderr == f"sagellm: cannot serve {folder}: {words}\n"
    assert "ready to serve" not in told.stdout


@pytest.mark.parametrize(
    "options",
    [("--max-model-len", "100000"), ("--device", "nowhere"), ("--num-blocks", "1000000000"),
     ("--set", "kv.host_gb=4000"), ("--set", "kv.eviction=lur"), ("--speculative", "medusa"),
     ("--set", "kv.pool=fre"),     ("--set", "scheduler.strategy=fiffo"), (),
     ("--kv-disk-gb", "0.001", "--kv-dir", __file__), ("--kv-remote-url", "http://somewhere"),
     ("--kv-host-gb", "0.1", "--set", "kv.prefix_caching=false")],
)  # fmt: skip
def test_what_serve_refuses_of_sound_weights(
    cli: Any, model: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    if not options:
        (folder / "tokenizer.json").unlink()
    told, served = (cli(name, str(folder), "--port", "0", *options) for name in ("doctor", "serve"))
    assert (told.exit_code, served.exit_code) == (2, 2)
    words = served.stderr.splitlines()[-1].removeprefix("sagellm: ")
    found = told.stderr.removeprefix(f"sagellm: cannot serve {folder}: ").strip()
    assert _without_sizes(found) == _without_sizes(words)
    assert "ready to serve" not in told.stdout


def _without_sizes(text: str) -> str:
    """What is free changes from one moment to the next."""
    return re.sub(r"[\d,.]+", "#", text)


def test_there_is_always_a_cpu() -> None:
    cpu = devices(has_torch=False)[-1]
    assert cpu.name == "cpu"
    assert 0 < cpu.free_bytes <= cpu.total_bytes


def test_meminfo_is_read_in_bytes() -> None:
    assert read_meminfo("MemTotal:  2 kB\nHugePages_Total:  0\n") == {"MemTotal": 2048}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (2_500_000, "2.5 MB"), (80 * 10**9, "80.0 GB")],
)
def test_bytes_as_text(num_bytes: int, text: str) -> None:
    assert as_text(num_bytes) == text


def test_other_vendors_chips_are_devices_and_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(VendorInterconnect, "__init__", lambda self: setattr(self, "_root", tmp_path))
    chip = EmulatedVendor(Ascend.info, tmp_path, monkeypatch)
    chip.plug_in()
    assert not [device for device in devices(has_torch=True) if device.name.startswith("npu")]
    assert "torch_npu is not installed" in capsys.readouterr().out
    chip.install()
    found = [device for device in devices(has_torch=True) if device.name.startswith("npu")]
    assert [device.name for device in found] == [f"npu:{index}" for index in range(NUM_DEVICES)]
    assert found[1].free_bytes == FREE_BYTES - 1
    assert found[0].description == "Huawei Ascend, links HCCS"


@pytest.mark.parametrize(
    ("free_mb", "label", "said"),
    [
        (1000, "NV18", "no division needed: weights and one request of full length fit cuda:0"),
        (1, "NV18", "division: parallel.tensor: 2 on cuda:0, cuda:1, since their own links join them all"),
        (1, "SYS", "division: parallel.pipeline: 2 on cuda:0, cuda:1, since no faster links than PCIe"),
        (0, "NV18", "fit no division of 4 devices"),
    ],
)
def test_several_devices_get_a_division(
    cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch, free_mb: int, label: str, said: str
) -> None:
    free = free_mb * 1_000_000
    machine = [LocalDevice(f"cuda:{i}", "a GPU", free, free) for i in range(4)]
    machine.append(LocalDevice("cpu", "a CPU", 8 << 30, 8 << 30))
    topology = read_recorded([("nvidia-smi", spaced_matrix(gpus(4), lambda i, j: label))])
    monkeypatch.setattr(doctor, "devices", lambda *, has_torch: machine)
    monkeypatch.setattr(SystemTopology, "detect", lambda self: topology)
    result = cli("doctor", "--port", "0", "--device", "cpu", "--max-model-len", "64")
    assert result.exit_code == 0, result.stdout
    assert said in result.stdout


def test_the_weights_of_each_rank_are_told(cli: Any, model: Path) -> None:
    result = cli("doctor", "--port", "0", "--set", "parallel.ffn=2")
    assert result.exit_code == 0, result.stdout
    assert re.search(r"rank 0, attention and all KV: weights of [\d.]+ [kM]B", result.stdout)
    assert re.search(r"rank 2, MLPs and experts: weights of [\d.]+ [kM]B", result.stdout)
    parts = [footprint(model, split=Split(rank, ffn=2)).weight_bytes for rank in range(3)]
    assert sum(parts) == footprint(model).weight_bytes
