"""What is read of the metrics of vLLM, SGLang and sageLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sagellm.core.errors import ConfigError
from sagellm.diagnostics.watch.counters import ServerCounters, metrics_url, read_counters, scrape

VLLM = """
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 500.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 300.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 300.0
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{engine="0",model_name="m",le="+Inf"} 12.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 12.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 1500.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",kv_cache_memory_bytes="1073741824",num_gpu_blocks="26214"} 1.0
vllm:cache_config_info{block_size="32",kv_cache_memory_bytes="1073741824",num_gpu_blocks="26214"} 1.0
"""
OURS = """
# TYPE sagellm_prefix_cache_queries counter
sagellm_prefix_cache_queries_total{model_name="sagellm-demo"} 10.0
# TYPE sagellm_prefix_cache_hits counter
sagellm_prefix_cache_hits_total{model_name="sagellm-demo"} 4.0
# TYPE sagellm_kv_blocks gauge
sagellm_kv_blocks{model_name="sagellm-demo",state="active"} 1.0
sagellm_kv_blocks{model_name="sagellm-demo",state="cached"} 2.0
sagellm_kv_blocks{model_name="sagellm-demo",state="free"} 97.0
"""
SGLANG = """
# TYPE sglang:prompt_tokens counter
sglang:prompt_tokens_total{model_name="q"} 200.0
# TYPE sglang:cached_tokens counter
sglang:cached_tokens_total{cache_source="device",model_name="q"} 40.0
sglang:cached_tokens_total{cache_source="host",model_name="q"} 10.0
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="q"} 5000.0
"""


def test_vllm_with_two_ranks() -> None:
    counters = read_counters(VLLM)
    assert counters == ServerCounters("vLLM", "m", 1500, 600, 12, 52_428, 32, 40_960)
    assert counters.hit_ratio == 0.4


def test_memory_says_nothing_where_the_number_of_blocks_was_given() -> None:
    given = VLLM.replace("block_size=", 'num_gpu_blocks_override="100",block_size=')
    assert read_counters(given).bytes_per_block is None
    assert read_counters(VLLM.replace("block_size=", 'num_gpu_blocks_override="None",block_size=')) == (
        read_counters(VLLM)
    )


def test_ours_and_sglang() -> None:
    assert read_counters(OURS) == ServerCounters("sageLLM", "sagellm-demo", 10, 4, None, 100)
    assert read_counters(SGLANG) == ServerCounters("SGLang", "q", 200, 50, None, 5000, 1)


def test_what_was_counted_before_is_taken_away_unless_the_server_started_anew() -> None:
    first, last = ServerCounters("vLLM", "m", 100, 50, 3), ServerCounters("vLLM", "m", 300, 60, 5)
    assert last.since(first) == ServerCounters("vLLM", "m", 200, 10, 2)
    assert first.since(last) == first
    assert last.since(ServerCounters()) == last
    assert ServerCounters().hit_ratio is None


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "it knows nothing"), ("up 1\n", "it knows up"), ("<html>{", "not in Prometheus' text format")],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_counters(text)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://h:8000", "http://h:8000/metrics"),
        ("http://h:8000/", "http://h:8000/metrics"),
        ("http://h:8000/v1/", "http://h:8000/metrics"),
        ("https://h/engine/metrics", "https://h/engine/metrics"),
        ("http://[::1]:80", "http://[::1]:80/metrics"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    assert metrics_url(address) == url


@pytest.mark.parametrize("address", ["", "h:8000", "tcp://h:5557", "http://", "http://[::1"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="write http://host:port"):
        metrics_url(address)


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/endless":
                self.endless()
                return
            is_found = self.path == "/metrics"
            self.send_response(200 if is_found else 404)
            self.end_headers()
            self.wfile.write(VLLM.encode() if is_found else b"")

        def endless(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(b"# nothing\n" * 100_000)

        def log_message(self, *arguments: object) -> None:
            pass

    live = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=live.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{live.server_port}"
    live.shutdown()
    live.server_close()


def test_scraping(server: str) -> None:
    assert scrape(metrics_url(server)).engine == "vLLM"
    with pytest.raises(ConfigError, match=r"answers 404.*Name their whole address"):
        scrape(f"{server}/other")
    with pytest.raises(ConfigError, match="answers without end"):
        scrape(f"{server}/endless")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300"])
def test_values_that_count_nothing_are_left_out(value: str) -> None:
    counters = read_counters(f'{SGLANG}\nsglang:prompt_tokens_total{{rank="1"}} {value}\n')
    assert counters.num_queried_tokens == 200


def test_labels_that_are_no_sizes_are_left_out() -> None:
    text = VLLM.replace('num_gpu_blocks="26214"', f'num_gpu_blocks="{"9" * 5000}"')
    assert read_counters(text.replace('block_size="32"', 'block_size="\u00b2"')).block_size is None


def test_nobody_answers() -> None:
    with pytest.raises(ConfigError, match=r"no metrics at http://127\.0\.0\.1:1/metrics"):
        scrape("http://127.0.0.1:1/metrics")
