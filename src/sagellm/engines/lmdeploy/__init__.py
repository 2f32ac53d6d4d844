"""Our KV cache policies inside LMDeploy's PyTorch engine."""
