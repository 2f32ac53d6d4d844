"""Where a hybrid model keeps checkpoints of its recurrent state."""
