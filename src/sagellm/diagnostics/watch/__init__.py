"""`sagellm watch`: what a running server's KV cache hits, what it could hit, and what would help."""
