"""The native engine: Hugging Face models in PyTorch, with a paged KV cache."""

PLUGIN = "sagellm.engines.native.backend:NativeBackend"
