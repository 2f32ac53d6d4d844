"""KV blocks from one instance to another: chunked, pipelined, checked."""
