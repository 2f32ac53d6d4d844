"""Readers of config.json: a module per kin of families, a function per family."""
