"""Tools for a running server, seen from outside."""
