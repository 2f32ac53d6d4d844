"""Optional packages: which extra brings them, and the command that installs it. sageLLM is on no package
index, so the command names the clone or the file that it was installed from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

EXTRA_OF: Mapping[str, str] = {
    "torch": "native",
    "safetensors": "native",
    "tokenizers": "native",
    "huggingface_hub": "native",
    "fastapi": "serve",
    "openai": "demo",
    "matplotlib": "plots",
    "pyarrow": "plots",
    "transformers": "transformers",
    "redis": "tiers",
    "zstandard": "tiers",
    "nixl_cu12": "nixl",
    "mooncake": "mooncake",
    "ray": "ray",
    "vllm": "vllm",
    "sglang": "sglang",
}
"""By the name under which a package is imported."""


def install_command(extra: str = "") -> str:
    """The pip command that adds an extra to this installation. Without an extra: the command that installs it
    anew."""
    wanted = f"[{extra}]" if extra else ""
    clone = Path(__file__).resolve().parents[3]
    if (clone / "pyproject.toml").is_file() and (clone / "src" / "sagellm").is_dir():
        return f"pip install -e {shlex.quote(f'{clone}{wanted}')}"
    source = _installed_from()
    if source is None:
        return f"pip install {shlex.quote(f'.{wanted}')} in a clone of sageLLM"
    if source.is_dir():
        return f"pip install {shlex.quote(f'{source}{wanted}')}"
    return f"pip install {shlex.quote(f'sagellm{wanted} @ {source.as_uri()}')}"


def _installed_from() -> Path | None:
    """The local folder or archive that pip recorded (PEP 610), if it still exists."""
    try:
        text = distribution("sagellm").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(text)["url"] if text else "")
    path = Path(url2pathname(url.path))
    return path if url.scheme == "file" and path.exists() else None
