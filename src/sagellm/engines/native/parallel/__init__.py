"""A model on several ranks, each a process of its own."""
