"""Our engine and its backends, plug-ins for other engines, and `build`, which joins modules."""
