"""Several tokens per forward pass: a draft proposes, the model verifies."""
