"""The transformers bridge: models of that library on our KV cache and matrices.

The only package that imports `transformers` (decision 0001). Import it only to describe or run a bridged
model: that library takes seconds to load.
"""
