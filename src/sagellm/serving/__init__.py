"""The OpenAI-compatible HTTP server.

`create_app` makes the application and `serve` runs it. `bind` makes the socket for `serve` beforehand, where
the address should be checked before a model is loaded.
"""

from sagellm.serving.app import create_app
from sagellm.serving.server import SageServer, bind, serve

__all__ = ["SageServer", "bind", "create_app", "serve"]
