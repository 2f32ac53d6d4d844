"""The vocabulary of sageLLM: types, plan, contracts, config, registry, events, clock, ports. Imports the
standard library and pydantic only; all other packages exchange the types that are defined here."""
