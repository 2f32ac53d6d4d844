"""What an OpenAI-compatible HTTP server costs beside its engine: latency and requests per second."""
