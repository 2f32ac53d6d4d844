"""`sagellm watch`: measures what a running KV cache hits and could hit."""
