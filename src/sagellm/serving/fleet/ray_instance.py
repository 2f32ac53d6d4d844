"""`RayInstance`: one instance of a fleet in the process of a Ray actor.

The same engine and server as in a child process of a host (`instance_process.py`). Ray carries three calls:
where it serves, that its process has ended, and that it is to end.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core.errors import ModelError, SageError
from sagellm.core.log_lines import set_up_logging

if TYPE_CHECKING:
    from sagellm.control_plane.fleet.instance_server import InstanceServer

log = logging.getLogger("sagellm.fleet")
END_S = 4.0
"""A step that runs when an instance is to end has so long."""


class RayInstance:
    """The methods of an actor, which Ray calls in threads of a pool. They take and give texts.

    `host`: the node's address, on which the instance listens; empty: the one that Ray gives.
    """

    def __init__(self, name: str, host: str = "") -> None:
        self._name, self._host = name, host
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._server: InstanceServer | None = None
        self._is_decided = threading.Event()
        self._error = ""
        self._watch = threading.Event()

    def __repr__(self) -> str:
        """Ray puts it before each line that the process writes."""
        return self._name

    def start(self, options: str) -> str:
        """Serve, if it does not yet. Waits until the model is loaded.

        `options`: JSON, those of `instance_server` without addresses, and `environment`, `log_level` and
        `log_format`. Gives JSON: `endpoint`, or `error` with the reason, after which this process is of no
        more use.
        """
        with self._lock:
            if self._thread is None:
                given = json.loads(options)
                self._thread = threading.Thread(target=self._serve, args=(given,), name="serve", daemon=True)
                self._thread.start()
        self._is_decided.wait()
        server = self._server
        return json.dumps({"error": self._error} if server is None else {"endpoint": server.endpoint})

    def watch(self) -> str:
        """Return when `watch` is called again, and else never.

        That a call is lost tells the caller that this process has ended.
        """
        with self._lock:
            former, self._watch = self._watch, threading.Event()
            mine = self._watch
        former.set()
        mine.wait()
        return ""

    def stop(self) -> str:
        """End serving, and return when all is closed."""
        server, thread = self._server, self._thread
        if server is not None and thread is not None:
            server.stop()
            thread.join(END_S)
        return ""

    def _serve(self, options: Mapping[str, Any]) -> None:
        os.environ.update(options["environment"])
        set_up_logging(options["log_level"], options["log_format"])
        # torch is loaded here, when Ray and `environment` have said which chips are visible
        from sagellm.serving.fleet.instance_process import instance_server, serve_instance

        try:
            host = self._host or _node_address()
            _check_folder(options["config"]["model"]["name"])
            at = f"[{host}]" if ":" in host else host
            self._server = instance_server({**options, "endpoint": f"tcp://{at}:0", "host": host})
        except Exception as error:  # the launcher logs it, whatever it is
            self._error = str(error) if isinstance(error, SageError) else f"{type(error).__name__}: {error}"
            log.debug("it cannot start", exc_info=True)
            return
        finally:
            self._is_decided.set()
        try:
            serve_instance(self._server)
        except BaseException:
            log.exception("%s has failed", self._name)
            logging.shutdown()
            os._exit(1)  # only a new process can go on, and Ray starts one


def _check_folder(name: str | None) -> None:
    if name is not None and Path(name).is_absolute() and not Path(name).is_dir():
        raise ModelError(
            f"there is no folder {name} on this node: each node needs the model at the same path"
        )


def _node_address() -> str:
    import ray

    found: str = ray.util.get_node_ip_address()
    return found
