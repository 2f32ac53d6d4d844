"""Measuring: traces, workloads, replay, simulation, reports, over what `engines/build.py` builds."""
