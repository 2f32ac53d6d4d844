"""The native engine: Hugging Face models in PyTorch, with a paged KV cache."""
