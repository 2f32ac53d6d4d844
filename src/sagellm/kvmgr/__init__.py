"""Management and scheduling of the KV cache inside one engine instance."""
