"""Weights and attention that can be left out, with a measured price in quality."""
