"""A fleet on a real Ray cluster of one node: two actors, their ends, their operation, and what they take.

In an environment with Ray: `PYTHONPATH=src:. python -m pytest -m peer tests/serving/fleet/test_ray_peer.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.serving.fleet_processes import Fleet, running_fleet

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray"),
]

NUM_CPUS, OBJECT_STORE_BYTES = 2, 80_000_000
MOST_BYTES = 1_000_000_000
WAIT_S = 400.0
HEAD = f"""
import sys, ray
found = ray.init(
    address="local", num_cpus={NUM_CPUS}, object_store_memory={OBJECT_STORE_BYTES}, include_dashboard=False,
    _temp_dir=sys.argv[1], log_to_driver=False, logging_level="ERROR",
)
print(found.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""
STATE = """
import json, ray
from ray._private.state import actors
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
groups = ray.util.placement_group_table()
print(json.dumps({
    "actors": [each["State"] for each in actors().values() if each["State"] != "DEAD"],
    "groups": [each["state"] for each in groups.values() if each["state"] != "REMOVED"],
    "free": ray.available_resources().get("CPU", 0.0),
}))
"""
FILE = """
server: {admin_key: an admin key}
kv: {num_blocks: 512}
fleet:
  ray_timeout_s: 60
  groups:
    prefill: {type: prefilling, chips: 0, ray_resources: {CPU: 0.5}}
    decode: {type: decoding, chips: 0, ray_resources: {CPU: 0.5}}
"""
ADMIN = {"Authorization": "Bearer an admin key"}
PROMPTS = [[number + 1, *range(1, 60)] for number in range(4)]


@pytest.fixture(scope="module")
def head() -> Iterator[subprocess.Popen[str]]:
    """A driver that has started a cluster, which ends with it."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}
        environment.pop("RAY_ADDRESS", None)
        with subprocess.Popen(
            [sys.executable, "-c", HEAD, folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            try:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("RAY_ADDRESS", address)
                    patch.setenv("RAY_AUTH_MODE", "token")
                    yield process
            finally:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(WAIT_S)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """What one engine answers."""
    with running_fleet(start_s=WAIT_S) as one:
        return [answered(one, prompt) for prompt in PROMPTS]


@contextmanager
def fleet_on_ray(folder: Path) -> Iterator[Fleet]:
    file = folder / "fleet.yaml"
    file.write_text(FILE, encoding="utf-8")
    with running_fleet("--config", str(file), "--ray", start_s=WAIT_S) as fleet:
        fleet.wait_until_healthy(WAIT_S)
        yield fleet


def answered(fleet: Fleet, prompt: list[int], max_tokens: int = 200) -> str:
    answer = fleet.complete(prompt, max_tokens, ignore_eos=True)
    assert answer["status"] == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


def pids(fleet: Fleet) -> dict[str, int]:
    return {each["name"]: each["pid"] for each in fleet.status()["instances"]}


def state() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", STATE], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def until(is_so: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s, what
        time.sleep(0.2)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> dict[int, str]:
    """Command lines of a process and all below it, by process id."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                parents[int(folder.name)] = (int(fields[1]), command)
            except OSError:
                continue
    found, grown = {pid: parents[pid][1]}, True
    while grown:
        more = {
            each: command
            for each, (parent, command) in parents.items()
            if parent in found and each not in found
        }
        found, grown = found | more, bool(more)
    return found


def pss(pid: int) -> int:
    """Bytes of a process, where shared pages count in parts."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def test_two_actors_answer_as_one_engine_in_less_than_a_gigabyte(
    head: subprocess.Popen[str], texts: list[str], tmp_path: Path
) -> None:
    with fleet_on_ray(tmp_path) as fleet:
        assert [answered(fleet, prompt) for prompt in PROMPTS] == texts
        of_ray = descendants(head.pid)
        assert of_ray.keys() >= set(pids(fleet).values())
        sizes = {pid: pss(pid) for pid in of_ray}
        for pid, size in sorted(sizes.items(), key=lambda item: -item[1]):
            print(f"{size / 1e6:6.0f} MB  {of_ray[pid][:90]}")
        ours = {pid: pss(pid) for pid in descendants(fleet.process.pid)}
        print(f"{sum(sizes.values()) / 1e6:.0f} MB: Ray, the driver that started it, and two actors")
        print(f"{sum(ours.values()) / 1e6:.0f} MB: the command (a driver of Ray), and the front")
        assert sum(sizes.values()) < MOST_BYTES

        actors = pids(fleet)
        for name in ("decode-0", "prefill-0"):
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                asked = [pool.submit(answered, fleet, prompt) for prompt in PROMPTS]
                until(lambda: fleet.status()["num_requests"] > 0, "no request has begun")
                os.kill(actors[name], signal.SIGKILL)
                assert [each.result() for each in asked] == texts
            until(lambda: pids(fleet)[name] not in (None, actors[name]), f"{name} was not started again")  # noqa: B023
            print(f"{name}: healthy again after {fleet.wait_until_healthy(WAIT_S):.1f} s")
            assert [answered(fleet, prompt) for prompt in PROMPTS] == texts

        for path, body, names in (
            ("restart", {"name": "decode-0"}, {"prefill-0", "decode-0"}),
            ("scale", {"group": "decode", "count": 2}, {"prefill-0", "decode-0", "decode-1"}),
            ("scale", {"group": "decode", "count": 1}, {"prefill-0", "decode-0"}),
        ):
            before = pids(fleet)
            answer = httpx2.post(
                f"{fleet.url}/v1/admin/fleet/{path}", json=body, headers=ADMIN, timeout=WAIT_S
            )
            assert answer.status_code == 200, answer.text
            assert pids(fleet).keys() == names
            assert path != "restart" or pids(fleet)["decode-0"] != before["decode-0"]
            assert [answered(fleet, prompt) for prompt in PROMPTS] == texts
        last = pids(fleet)
        assert len(state()["groups"]) == 1
    until(lambda: not any(map(lives, last.values())), "actors are left")
    until(lambda: state() == {"actors": [], "groups": [], "free": NUM_CPUS}, "Ray still holds something")


def test_nothing_is_left_of_a_command_that_was_killed(head: subprocess.Popen[str], tmp_path: Path) -> None:
    with fleet_on_ray(tmp_path) as fleet:
        actors = pids(fleet)
        fleet.process.kill()
        until(lambda: not any(map(lives, actors.values())), "actors are left")
    until(lambda: state() == {"actors": [], "groups": [], "free": NUM_CPUS}, "Ray still holds something")


def test_a_cluster_without_the_resources(head: subprocess.Popen[str]) -> None:
    groups = {"a": {"chips": 4, "ray_resources": {"h100": 4}}}
    command = [
        sys.executable, "-m", "sagellm", "serve", "--port", "0", "--ray", "--set", "fleet.ray_timeout_s=3",
        "--set", f"fleet.groups={json.dumps(groups)}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 2
    assert "no room for a-0 within 3 s" in done.stderr
    assert "GPU 4 asked, the cluster has GPU 0; h100 4 asked, the cluster has h100 0" in done.stderr
    until(lambda: state() == {"actors": [], "groups": [], "free": NUM_CPUS}, "Ray still holds something")
