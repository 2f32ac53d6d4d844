"""Hosts that run our loop, guests in another engine's loop, and the one place where modules are joined."""
