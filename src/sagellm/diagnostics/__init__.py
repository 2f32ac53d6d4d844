"""Tools for a running server, seen from outside: `watch` measures its KV cache, `verify` tests its cache
hits."""
