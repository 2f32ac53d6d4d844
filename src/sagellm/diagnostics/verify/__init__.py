"""`sagellm verify`: tests whether a running server answers alike with and without cache hits."""
