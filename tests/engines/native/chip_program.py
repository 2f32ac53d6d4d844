"""The demo model on the CPU and on an emulated NPU, in a process of its own: `test_other_chips.py` runs it.

Argument: the root below which `dev/davinci0` lies. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

from sagellm.comm.interconnect.ascend import Ascend
from sagellm.core.config import Config
from sagellm.core.types import SamplingParams
from sagellm.engines.build import build_llm
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.accelerators import default_device, free_bytes, runs_triton
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.options import usable_device
from tests.emulated_device import EmulatedModule, install

PROMPTS = ["The sea is deep and the ships are", "Once upon a time there was a king who had a"]


def main(root: Path) -> None:
    npu = install()
    package = ModuleType("torch_npu")
    package.__spec__ = ModuleSpec("torch_npu", None)
    sys.modules["torch_npu"] = package
    setattr(Ascend, "__init__", lambda self: setattr(self, "_root", root))  # noqa: B010 - mypy
    device = torch.device("npu")
    found = {
        "default": str(default_device()),
        "usable": str(usable_device("npu:0")),
        "free_bytes": free_bytes(device),
        "runs_triton": runs_triton(device),
        "texts": {name: texts(name) for name in ("cpu", "npu")},
        "distance": distance(),
        "calls": calls(npu),
    }
    print(json.dumps(found))


def texts(device: str) -> list[str]:
    """What greedy decoding gives, twice for each prompt, so that KV comes back from host memory."""
    config = Config.model_validate(
        {
            "model": {"device": device, "dtype": "float32"},
            "kv": {"host_gb": 0.01, "num_blocks": 4},
            "scheduler": {"max_num_seqs": 2},
        }
    )
    llm = build_llm(config)
    params = SamplingParams(max_tokens=6, temperature=0.0)
    found = [
        completion.text for _ in range(2) for prompt in PROMPTS for completion in llm.generate(prompt, params)
    ]
    llm.close()
    return found


def distance() -> float:
    """How far the logits on the NPU are from those on the CPU."""
    logits = []
    for device in ("cpu", "npu"):
        backend = NativeBackend(DEMO_MODEL, device=device, dtype="float32", num_blocks=8, max_num_seqs=1)
        logits.append(backend.prompt_logits(range(1, 50)))
        backend.close()
    return float((logits[0] - logits[1]).abs().max())


def calls(npu: EmulatedModule) -> dict[str, int]:
    return {name: npu.calls[name] for name in ("mem_get_info", "stream", "device", "aten::index_copy_")}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
