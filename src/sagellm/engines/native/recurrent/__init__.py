"""Layers with a recurrent state of fixed size in place of KV."""
