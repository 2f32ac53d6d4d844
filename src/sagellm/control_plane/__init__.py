"""Between instances: routing, queues, admission. Knows engines as `EngineClient` only."""
