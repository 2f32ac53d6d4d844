"""Fewer bits for weights, KV and activations, with a measured price in quality."""
