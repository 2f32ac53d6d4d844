"""The native engine: Hugging Face models in PyTorch, with a paged KV cache."""

from pathlib import Path

PLUGIN = "sagellm.engines.native.from_config:native_backend"
DEMO_MODEL = Path(__file__).parent / "demo_model"
DEMO_NAME = "sagellm-demo"
