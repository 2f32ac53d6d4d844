"""Collective operations over ranks: all_reduce, all_gather, reduce_scatter, broadcast and their kin."""
