"""Weight files: shards, damage, missing and misshapen tensors, dtypes, progress; nothing is allocated too
early.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Linear

from sagellm.core.errors import MissingWeightsError, ModelError, UnsupportedModelError, WeightShapeError
from sagellm.engines.native.architectures import read_config, read_spec
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from sagellm.engines.native.hub import model_folder
from sagellm.engines.native.loading import ModelWeights, WeightLoader
from sagellm.engines.native.matrices import Dense
from sagellm.engines.native.weights import check, parameters
from tests.tiny_models import save_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "llama")
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    plan, checkpoint = parameters(read_spec(read_config(folder))), Checkpoint(folder)
    check(plan, checkpoint)
    return values(WeightLoader(checkpoint, CPU, dtype, dtype).weights(plan))


def values(weights: ModelWeights) -> dict[str, torch.Tensor]:
    """All parameters, matrices without `.weight`."""
    matrices = {name: m for name, m in weights.matrices.items() if isinstance(m, Dense)}
    assert matrices.keys() == weights.matrices.keys()
    assert isinstance(weights.embedding, Dense)
    whole = {name: matrix.weight for name, matrix in matrices.items()}
    return whole | weights.tensors | {"embed": weights.embedding.weight}


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE_FILE).items()}
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


@pytest.fixture
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were allocated before the checkpoint was checked")

    monkeypatch.setattr(WeightLoader, "weights", refuse)


def test_shards_load_as_one_file_does(folder: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    save_tiny(sharded, "llama", max_shard_size="100KB")
    assert (sharded / INDEX_FILE).exists()
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = loaded(folder), loaded(sharded)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_fused_parameters_are_the_pieces_stacked(folder: Path) -> None:
    stored, ours = load_file(folder / SINGLE_FILE), loaded(folder)
    pieces = [stored[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(ours["layers.1.qkv"], torch.cat(pieces))


def test_names_without_their_first_word_are_found(folder: Path) -> None:
    before = loaded(folder)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(folder, rename)
    assert torch.equal(loaded(folder)["layers.0.up"], before["layers.0.up"])


def test_values_are_rounded_to_the_dtype_and_held_in_the_compute_dtype(folder: Path) -> None:
    plan, checkpoint = parameters(read_spec(read_config(folder))), Checkpoint(folder)
    rounded = values(WeightLoader(checkpoint, CPU, torch.bfloat16, torch.float32).weights(plan))["embed"]
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, loaded(folder)["embed"].bfloat16().float())


def test_progress_counts_all_bytes(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    NativeBackend(folder, num_blocks=1, threads=1, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]
    assert calls[-1][1] == sum(tensor.nbytes for tensor in load_file(folder / SINGLE_FILE).values())


@pytest.mark.usefixtures("no_allocation")
class TestRefusals:
    """One clear error before anything is allocated."""

    def fails(self, folder: Path, error: type[ModelError], words: str) -> None:
        with pytest.raises(error, match=words):
            NativeBackend(folder, threads=1)

    def test_no_weights(self, folder: Path) -> None:
        (folder / SINGLE_FILE).unlink()
        self.fails(folder, MissingWeightsError, SINGLE_FILE)
        (folder / "pytorch_model.bin").touch()
        self.fails(folder, MissingWeightsError, r"pickled weights .* are never loaded.*save_pretrained")

    def test_missing_shard(self, tmp_path: Path) -> None:
        save_tiny(tmp_path, "llama", max_shard_size="100KB")
        sorted(tmp_path.glob("*.safetensors"))[1].unlink()
        self.fails(tmp_path, MissingWeightsError, r"1 of \d+ weight files.*model-00002")

    @pytest.mark.parametrize(
        ("present", "words"),
        [
            ("model-00001-of-00002.safetensors", f"fetch {INDEX_FILE}"),
            ("model.gguf", "GGUF files are not read"),
            ("README.md", "fetch the model's safetensors files"),
        ],
    )
    def test_a_folder_without_weights_says_what_to_fetch(
        self, folder: Path, present: str, words: str
    ) -> None:
        (folder / SINGLE_FILE).unlink()
        (folder / present).touch()
        self.fails(folder, MissingWeightsError, words)

    @pytest.mark.parametrize(
        "text", ['{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "b", "c": ["d"]}}']
    )
    def test_damaged_index(self, folder: Path, text: str) -> None:
        (folder / INDEX_FILE).write_text(text, encoding="utf-8")
        self.fails(folder, ModelError, f"{INDEX_FILE} is not an index.*a file name for each tensor")

    @pytest.mark.parametrize("name", ["config.json", SINGLE_FILE, INDEX_FILE])
    def test_a_file_that_cannot_be_read(self, folder: Path, name: str) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
        self.fails(folder, ModelError, rf"{name} cannot be read \(Is a directory\): it has to be a file")

    def test_missing_tensor(self, folder: Path) -> None:
        def drop(tensors: dict[str, torch.Tensor]) -> None:
            del tensors["model.layers.2.mlp.up_proj.weight"]

        rewrite(folder, drop)
        self.fails(folder, MissingWeightsError, "model.layers.2.mlp.up_proj.weight")

    def test_wrong_shape(self, folder: Path) -> None:
        def cut(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(127, 96)

        rewrite(folder, cut)
        self.fails(folder, WeightShapeError, r"layers\.0\.self_attn\.k_proj.*\[128, 96\].*\[127, 96\]")

    @pytest.mark.parametrize("prefix", ["model.", ""])
    @pytest.mark.parametrize("module", ["self_attn.q_proj", "self_attn.o_proj", "input_layernorm"])
    def test_a_bias_that_config_json_does_not_announce(self, folder: Path, module: str, prefix: str) -> None:
        name = f"{prefix}layers.1.{module}.bias"
        rewrite(folder, lambda tensors: tensors.update({name: torch.tensor([0.0, 0.5])}))
        self.fails(folder, UnsupportedModelError, rf"has {name}, not zero.*attention_bias")

    def test_truncated_file(self, folder: Path) -> None:
        path = folder / SINGLE_FILE
        path.write_bytes(path.read_bytes()[:-100])
        self.fails(folder, ModelError, "cut short.*fetch it again")

    @pytest.mark.parametrize("size", [0, 5, 100])
    def test_cut_in_the_header(self, folder: Path, size: int) -> None:
        path = folder / SINGLE_FILE
        path.write_bytes(path.read_bytes()[:size])
        self.fails(folder, ModelError, "cut short")

    @pytest.mark.parametrize(
        "header",
        [b"not json", b"[]", b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b'{"a": {}}'],
    )
    def test_damaged_header(self, folder: Path, header: bytes) -> None:
        (folder / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        self.fails(folder, ModelError, "damaged safetensors header")

    def test_unsupported_architecture(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["architectures"] = ["GPT2LMHeadModel"]
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self.fails(folder, UnsupportedModelError, "GPT2LMHeadModel")


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3", "opt-plain-untied"])
def test_a_bias_where_transformers_has_none_is_refused(name: str, tmp_path: Path) -> None:
    prefix = "model.decoder.layers.1." if "opt" in name else "model.layers.1."
    layer = save_tiny(tmp_path, name).get_submodule(prefix.removesuffix("."))
    plan, stored = parameters(read_spec(read_config(tmp_path))), load_file(tmp_path / SINGLE_FILE)
    tensors = {key: tensor.clone() for key, tensor in stored.items()}
    without = [
        key
        for key, one in layer.named_modules()
        if isinstance(one, Linear) and "bias" not in dict(one.named_parameters())
    ]
    assert len(without) >= 4
    for module in without:
        save_file({**tensors, f"{prefix}{module}.bias": torch.ones(3)}, tmp_path / SINGLE_FILE)
        with pytest.raises(UnsupportedModelError, match=f"{prefix}{module}.bias, not zero"):
            check(plan, Checkpoint(tmp_path))


def test_what_is_not_used_is_said_once_and_constants_are_not(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    constants = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.self_attn.masked_bias": torch.ones(()),
        "model.layers.1.self_attn.k_proj.bias": torch.zeros(128),
    }
    rewrite(folder, lambda tensors: tensors.update(constants))
    loaded(folder)
    assert not caplog.records
    strays = {f"model.layers.{i}.self_attn.q_norm.weight": torch.ones(64) for i in range(9)}
    rewrite(folder, lambda tensors: tensors.update(strays))
    loaded(folder)
    [record] = caplog.records
    assert (record.name, record.levelname) == ("sagellm.weights", "WARNING")
    assert "model.layers.0.self_attn.q_norm.weight" in record.getMessage()
    assert record.getMessage().endswith("model.layers.3.self_attn.q_norm.weight and 5 more")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.int32])
def test_what_is_of_no_dtype_of_a_bias_is_said_as_not_used(
    folder: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.1.self_attn.k_proj.bias"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(128).to(dtype)}))
    loaded(folder)
    [record] = caplog.records
    assert record.getMessage().endswith(f"a model without: {name}")


def test_a_tied_head_that_is_stored_too_is_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path, "llama-head80-tied")
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(257, 64)}))
    loaded(tmp_path)
    assert not caplog.records


@pytest.mark.usefixtures("no_allocation")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_of_other_numbers_are_refused(folder: Path, dtype: torch.dtype) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)

    rewrite(folder, quantize)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight: config.json implies F64 or F32"):
        NativeBackend(folder, threads=1)


def test_a_hub_name_without_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"no route to host.*Give a folder"):
        model_folder("nobody/no-such-model")
    for name in (str(tmp_path / "absent"), "./absent", "a/b/c"):
        with pytest.raises(ModelError, match="not a model folder"):
            model_folder(name)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copied_parts_of_the_file_are_let_go(tmp_path: Path, dtype: torch.dtype) -> None:
    """Loading needs the memory of the model once: the mapped pages do not stay beside it."""
    stored = torch.arange(24 << 20, dtype=torch.float32).view(-1, 1024)
    save_file({"matrix": stored}, tmp_path / SINGLE_FILE)
    checkpoint, target = Checkpoint(tmp_path), torch.ones(stored.shape, dtype=dtype)
    before = mapped_file_bytes()
    row = 0
    for part in checkpoint.parts("matrix", dtype):
        target[row : row + len(part)] = part
        row += len(part)
    assert mapped_file_bytes() - before < stored.nbytes // 4
    assert torch.equal(target, stored.to(dtype))


def mapped_file_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    [line] = [line for line in text.splitlines() if line.startswith("RssFile")]
    return int(line.split()[1]) * 1024
