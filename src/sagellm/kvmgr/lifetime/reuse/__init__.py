"""Predictors of block reuse, one file each."""
