"""Traces of requests: read any known format, write two of them, generate, record."""

from sagellm.benchmarks.traces._parsing import BrokenLineError
from sagellm.benchmarks.traces.files import read_trace, write_trace
from sagellm.benchmarks.traces.record import BadLine, Trace, TraceRequest, block_ids, block_size

__all__ = [
    "BadLine",
    "BrokenLineError",
    "Trace",
    "TraceRequest",
    "block_ids",
    "block_size",
    "read_trace",
    "write_trace",
]
