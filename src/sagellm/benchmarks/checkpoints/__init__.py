"""Replays traces of hybrid models: where to make and keep checkpoints of recurrent state."""
