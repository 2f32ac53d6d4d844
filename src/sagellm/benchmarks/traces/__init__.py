"""Traces of requests: read any known format, write ours and Mooncake's, generate, record."""

from sagellm.benchmarks.traces._parsing import BrokenLineError
from sagellm.benchmarks.traces.blocks import block_ids, block_size
from sagellm.benchmarks.traces.reading import read_trace
from sagellm.benchmarks.traces.record import BadLine, Trace, TraceRequest
from sagellm.benchmarks.traces.writing import write_trace

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
