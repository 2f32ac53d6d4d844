"""Acceleration: quantization, sparsity, speculation, fusion, chain of thought; none knows another."""
