"""A server that speaks vLLM's or SGLang's protocol; its model is arithmetic.

What it sends was written down from vLLM 0.32 and SGLang 0.5.23. A test makes it slow, busy, or wrong.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests import quick_servers  # noqa: F401

MODEL, VOCAB, MAX_LEN, EOS, PATIENCE_S = "tiny", 1000, 256, 7, 60.0


def next_token(tokens: Sequence[int], vocab: int) -> int:
    """The model: each token follows from all before it. It draws `EOS` only where a test asks for it."""
    found = (31 * sum(tokens) + 17 * len(tokens)) % vocab
    return found if found != EOS else EOS + 1


def continued(tokens: Sequence[int], num: int, vocab: int = VOCAB) -> list[int]:
    """The next `num` tokens."""
    found = list(tokens)
    for _ in range(num):
        found.append(next_token(found, vocab))
    return found[len(tokens) :]


class StandIn:
    """One server. `kind`: "vllm" or "sglang".

    `delay_s`: before each token. `cut_after`: the stream ends after so many tokens, in the middle of a
    message. `statuses`: what the next requests are answered with. `change`: of a message before it is sent;
    None: it is left out.
    """

    def __init__(self, kind: str, *, port: int = 0, **settings: Any) -> None:
        self.kind = kind
        self.delay_s, self.cut_after, self.ends_early = 0.0, -1, False
        self.statuses: list[int] = []
        self.health, self.health_s = 200, 0.0
        self.models, self.vocab = [MODEL], VOCAB
        self.owner, self.version, self.key = kind, "0.32.0", ""
        self.metrics: str | None = METRICS
        self.info: dict[str, Any] = {}
        self.cached = 0
        self.per_message = 1
        self.eos_at = -1
        self.tokenize: Callable[[str], list[int]] | None = None
        self.change: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda message: message
        self.bodies: list[dict[str, Any]] = []
        self.num_running = self.num_aborted = self.num_cleared = 0
        vars(self).update(settings)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            self._app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def kill(self) -> None:
        """As the end of its process: all connections end at once."""
        loop = self._server.servers[0].get_loop()
        loop.call_soon_threadsafe(self._end_connections)
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)

    async def _serve(self) -> None:
        """Until `kill`. A connection that came just before has its transport a few turns later."""
        await self._server.serve([self._socket])
        for _ in range(5):
            await asyncio.sleep(0.01)
            self._abort_all()

    def _end_connections(self) -> None:
        self._server.servers[0].close()
        self._abort_all()

    def _abort_all(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def _app(self) -> Starlette:
        paths: dict[str, Any] = {
            "/v1/models": self._list,
            "/health": self._is_healthy,
            "/ready": self._is_healthy,
            "/tokenize": self._tokens,
            "/v1/completions" if self.kind == "vllm" else "/generate": self._generate,
            "/reset_prefix_cache" if self.kind == "vllm" else "/flush_cache": self._clear,
        }
        if self.kind == "vllm":
            paths |= {"/version": self._version, "/metrics": self._show_metrics}
        else:
            paths |= {"/server_info": self._show_info, "/v1/loads": self._loads}
        routes = [Route(path, handler, methods=["GET", "POST"]) for path, handler in paths.items()]
        return Starlette(routes=routes)

    def _refuses(self, request: Request) -> bool:
        return bool(self.key) and request.headers.get("authorization") != f"Bearer {self.key}"

    async def _list(self, request: Request) -> Response:
        if self._refuses(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        cards = [
            {"id": name, "object": "model", "owned_by": self.owner, "root": name, "max_model_len": MAX_LEN}
            for name in self.models
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": self.version})

    async def _is_healthy(self, request: Request) -> Response:
        await asyncio.sleep(self.health_s)
        return Response(status_code=self.health)

    async def _show_metrics(self, request: Request) -> Response:
        if self.metrics is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        return PlainTextResponse(self.metrics)

    async def _show_info(self, request: Request) -> Response:
        known = {"version": "0.5.23", "page_size": 4, "max_total_num_tokens": 4000, "is_embedding": False}
        return JSONResponse(known | self.info)

    async def _loads(self, request: Request) -> Response:
        core = {
            "dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 2, "num_waiting_uncached_tokens": 77,
            "token_usage": 0.25, "total_prefill_uncached_tokens": 1000 * len(self.bodies),
            "total_prefill_busy_us": 2_000_000 * len(self.bodies),
        }  # fmt: skip
        return JSONResponse({"version": "0.5.23", "loads": [core]})

    async def _tokens(self, request: Request) -> Response:
        if self.tokenize is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        tokens = self.tokenize((await request.json())["prompt"])
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": MAX_LEN})

    async def _clear(self, request: Request) -> Response:
        self.num_cleared += 1
        return Response(status_code=200)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self._refuses(request):
            return JSONResponse({"error": "Unauthorized"}, 401)
        if self.kind == "vllm" and body["model"] not in self.models:
            error = {"message": f"The model `{body['model']}` does not exist.", "code": 404}
            return JSONResponse({"error": error}, 404)
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return JSONResponse({"error": {"message": f"told to say {status}", "code": status}}, status)
        if not body["stream"]:
            return JSONResponse(self._whole(body))
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.num_running += 1
        is_done = False
        try:
            for num_sent, message in enumerate(self._messages(body)):
                await asyncio.sleep(self.delay_s)
                changed = self.change(message)
                data = b"data: " + json.dumps(changed).encode() + b"\n\n"
                if num_sent == self.cut_after:
                    self.cut_after = -1
                    yield data[: len(data) // 2]
                    if self.ends_early:
                        return
                    raise ConnectionError("cut")
                if changed is not None:
                    yield data
            yield b"data: [DONE]\n\n"
            is_done = True
        finally:
            self.num_running -= 1
            self.num_aborted += not is_done

    def _messages(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        is_vllm = self.kind == "vllm"
        given = body if is_vllm else body["sampling_params"]
        prompt = body["prompt"] if is_vllm else body["input_ids"]
        most = given["max_tokens" if is_vllm else "max_new_tokens"]
        tokens = continued(prompt, most, self.vocab)
        if 0 <= self.eos_at < most:
            tokens[self.eos_at] = EOS
        ends = [i for i, token in enumerate(tokens) if token in given["stop_token_ids"]]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        reason = "stop" if ends else "length"
        for start in range(0, len(tokens), self.per_message):
            stop = min(len(tokens), start + self.per_message)
            finish = reason if stop == len(tokens) else None
            if is_vllm:
                yield self._vllm_chunk(body, tokens[start:stop], finish)
            else:
                yield self._sglang_message(body, prompt, tokens, start, stop, finish)
        if is_vllm and body.get("stream_options"):
            usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
            if self.cached:
                usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
            yield {"id": "cmpl-1", "choices": [], "usage": usage}

    def _vllm_chunk(self, body: dict[str, Any], new: list[int], finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": "x" * len(new),
            "logprobs": None,
            "finish_reason": finish,
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = new
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "text_offset": [0] * len(new),
                "tokens": [f"token_id:{token}" for token in new],
                "token_logprobs": [score(token) for token in new],
                "top_logprobs": [
                    {f"token_id:{other}": score(other) for other in around(token, body["logprobs"])}
                    for token in new
                ],
            }
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        chunks = list(self._messages(body))
        choice = chunks[-1]["choices"][0]
        choice["token_ids"] = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        if body.get("logprobs") is not None:
            lists = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            choice["logprobs"] = {name: [x for each in lists for x in each[name]] for name in lists[0]}
        choice["prompt_logprobs"] = [None] + [
            {str(other): {"logprob": score(other), "rank": 1, "decoded_token": "x"}
             for other in around(token, body["prompt_logprobs"])}
            for token in body["prompt"][1:]
        ]  # fmt: skip
        return {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}

    def _sglang_message(
        self,
        body: dict[str, Any],
        prompt: list[int],
        tokens: list[int],
        start: int,
        stop: int,
        finish: str | None,
    ) -> dict[str, Any]:
        first = start if self.info.get("incremental_streaming_output") else 0
        meta: dict[str, Any] = {
            "id": "1", "finish_reason": finish and {"type": finish, "length": stop},
            "prompt_tokens": len(prompt), "completion_tokens": stop, "cached_tokens": self.cached,
        }  # fmt: skip
        if body.get("return_logprob"):
            num = body["top_logprobs_num"]
            meta["output_token_logprobs"] = [[score(token), token, None] for token in tokens[first:stop]]
            meta["output_top_logprobs"] = [
                [[score(other), other, None] for other in around(token, num)] for token in tokens[first:stop]
            ]
            if body["logprob_start_len"] == 0:
                meta["input_token_logprobs"] = [[None, prompt[0], None]] + [
                    [score(token), token, None] for token in prompt[1:]
                ]
                meta["input_top_logprobs"] = [None] + [
                    [[score(other), other, None] for other in around(token, num)] for token in prompt[1:]
                ]
        return {"text": "x" * stop, "output_ids": tokens[first:stop], "meta_info": meta}


def score(token: int) -> float:
    """The log-probability of a token, whatever is before it."""
    return -0.5 - token / 100


def around(token: int, num: int) -> list[int]:
    """The tokens with the best scores, and the drawn one, which servers add."""
    return list(dict.fromkeys([token, *range(num)]))


METRICS = """\
# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="x"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:cache_config_info{block_size="4",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="tiny"} 2.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="tiny"} 1000.0
process_start_time_seconds 1.7e+09
"""


@contextmanager
def standing_in(kind: str, **settings: Any) -> Iterator[StandIn]:
    server = StandIn(kind, **settings)
    try:
        yield server
    finally:
        if server._thread.is_alive():
            server.kill()


def wait_until(is_so: Callable[[], Any], what: str = "") -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s, f"what the test waits for did not happen: {what}"
        time.sleep(0.002)
