"""Communication behind computation: what may run at the same time, and in which order."""
