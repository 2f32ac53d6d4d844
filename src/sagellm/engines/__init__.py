"""Engines: hosts that run our loop, guests that sit in another engine's, and the one place where modules are joined."""
