"""The vocabulary of sageLLM: types, plan, contracts, config, registry, events, clock, ports.

Imports the standard library and pydantic only; every other package speaks through what is defined here.
"""
