"""The native engine: Hugging Face models in PyTorch, on CPU or any torch device, with a paged KV cache."""
