"""The processes of a fleet on one host: a supervisor, a front, instances."""
