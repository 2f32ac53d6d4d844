"""The OpenAI-compatible HTTP server: `create_app` for the application, `serve` to run it."""

from sagellm.serving.app import create_app
from sagellm.serving.server import make_server, serve

__all__ = ["create_app", "make_server", "serve"]
