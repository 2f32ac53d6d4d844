"""`sagellm verify`: whether a running server's cache hits give the answers that it gives without them."""
