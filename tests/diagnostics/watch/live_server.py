"""A server as `watch` sees one: KV events on a socket, and metrics over HTTP; what it serves is played."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import zmq

from sagellm.control_plane.kv_events import KVEventBatch, encode_batch
from tests.diagnostics.watch.reference_cache import BLOCK, ReferenceCache

METRICS = """
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{model_name="toy"}} {queried}
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{model_name="toy"}} {hit}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{block}",num_gpu_blocks="{blocks}"}} 1.0
"""


class LiveServer:
    """Serves prompts by a `ReferenceCache`. `events` and `url` are its addresses."""

    def __init__(self, num_blocks: int = 50, *, reports_hits: bool = False) -> None:
        self.cache = ReferenceCache(num_blocks, reports_hits=reports_hits)
        self.queried = self.hit = self.num_sent = 0
        self.is_down = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.bind("tcp://127.0.0.1:*")
        self.events = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(503 if server.is_down else 200)
                self.end_headers()
                self.wfile.write(b"" if server.is_down else server.metrics().encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def metrics(self) -> str:
        return METRICS.format(queried=self.queried, hit=self.hit, block=BLOCK, blocks=self.cache.num_blocks)

    def serve(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> None:
        """Serve a request and publish what it changes."""
        self.hit += BLOCK * self.cache.serve(prompt, answer, time_s=time.time())
        self.queried += len(prompt)
        for item in self.cache.items[self.num_sent :]:
            self.send(encode_batch(item.batch))

    def send(self, payload: bytes, skip: int = 0) -> None:
        """Publish a payload. `skip`: numbers that are left out before it."""
        self.num_sent += skip
        self._socket.send_multipart([b"", self.num_sent.to_bytes(8, "big"), payload])
        self.num_sent += 1
        while (
            len(self.cache.items) < self.num_sent
        ):  # numbers of the cache's batches stay those that are sent
            self.cache.idle()

    def idle(self) -> None:
        """Publish a batch without events."""
        self.send(encode_batch(KVEventBatch(time.time(), [])))

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
