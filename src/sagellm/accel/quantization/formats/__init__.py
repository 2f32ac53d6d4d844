"""Readers of checkpoints that store their matrices quantized, by `quant_method` of their config.json."""
