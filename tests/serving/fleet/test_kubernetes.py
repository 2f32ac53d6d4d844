"""Manifests parse as YAML, agree with the fleet file and with each other, and are those in `deploy/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sagellm.control_plane.fleet_instances import fleet_instances, group_of, instance_config
from sagellm.core.config_layers import Resolved
from sagellm.core.errors import ConfigError
from sagellm.core.ports import SagePorts
from sagellm.engines.build import load_config
from sagellm.serving.fleet.kubernetes import (
    KEY_VARIABLE,
    PLACEHOLDER,
    SECRET,
    ManifestOptions,
    manifests,
    write_manifests,
)

DEPLOY = Path(__file__).parents[3] / "deploy"
FILE = """
model: {max_model_len: 4096}
kv: {num_blocks: 100}
fleet:
  lease_s: 5.0
  chips_file: chips.json
  shared_key_file: key
  groups:
    prefill: {type: prefilling, settings: {parallel.tensor: 2}}
    decode: {type: decoding, count: 3, chips: 1, cores: 4, memory_gb: 40, max_count: 5}
    cpu: {chips: 0, cores: 2, memory_gb: 1.5, settings: {kv: {num_blocks: 7}}}
    vllm: {servers: [{url: "http://vllm", events: "tcp://vllm:1", api_key_variable: VLLM_KEY}]}
"""


def read(path: Path, text: str) -> Resolved:
    path.write_text(text, encoding="utf-8")
    return load_config(path, environ={})


@pytest.fixture
def resolved(tmp_path: Path) -> Resolved:
    return read(tmp_path / "fleet.yaml", FILE)


@pytest.fixture
def objects(resolved: Resolved, tmp_path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What is written, read again: by kind and name."""
    found = {}
    for path in write_manifests(resolved, tmp_path / "out", ManifestOptions("image:1", "llm")):
        for each in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            assert each["metadata"]["namespace"] == "llm"
            found[each["kind"], each["metadata"]["name"]] = each
    return found


def container(workload: dict[str, Any]) -> dict[str, Any]:
    [only] = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def test_there_is_an_object_for_each_part(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert set(objects) == {
        ("ConfigMap", "sagellm-fleet"), ("Secret", SECRET), ("Deployment", "sagellm-front"), ("Service", "sagellm"),
        *((kind, f"sagellm-{group}") for kind in ("StatefulSet", "Service") for group in ("prefill", "decode", "cpu")),
    }  # fmt: skip


def test_the_config_map_holds_the_same_fleet(
    objects: dict[tuple[str, str], dict[str, Any]], resolved: Resolved, tmp_path: Path
) -> None:
    """Each instance has the name, type and configuration that it would have on one host."""
    file = tmp_path / "in-cluster.yaml"
    file.write_text(objects["ConfigMap", "sagellm-fleet"]["data"]["fleet.yaml"], encoding="utf-8")
    there = load_config(file, environ={KEY_VARIABLE: "k" * 16})
    instances = fleet_instances(there.config.fleet)
    assert [(i.name, i.type) for i in instances] == [
        (i.name, i.type) for i in fleet_instances(resolved.config.fleet)
    ]
    assert not any(instance.is_local for instance in instances)
    for group in ("prefill", "decode", "cpu"):
        assert instance_config(there, group) == instance_config(resolved, group)
    assert there.config.fleet.lease_s == 5.0
    assert there.config.fleet.chips_file is None


def test_addresses_are_host_names_of_stateful_sets(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
    fleet = yaml.safe_load(objects["ConfigMap", "sagellm-fleet"]["data"]["fleet.yaml"])["fleet"]
    for name in ("prefill", "decode", "cpu"):
        stateful, service = objects["StatefulSet", f"sagellm-{name}"], objects["Service", f"sagellm-{name}"]
        host, port = stateful["metadata"]["name"], service["spec"]["ports"][0]["port"]
        assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
        assert service["spec"]["clusterIP"] == "None"
        assert stateful["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
        assert service["spec"]["selector"] == stateful["spec"]["template"]["metadata"]["labels"]
        number = stateful["spec"]["replicas"]
        assert fleet["groups"][name]["addresses"] == [
            f"tcp://{host}-{i}.{host}:{port}" for i in range(number)
        ]
        assert container(stateful)["ports"][0]["containerPort"] == port == int(SagePorts.INSTANCE)


def test_an_instance_is_told_its_name(
    objects: dict[tuple[str, str], dict[str, Any]], resolved: Resolved
) -> None:
    arguments = container(objects["StatefulSet", "sagellm-decode"])["args"]
    assert arguments == [
        "serve",
        "--config",
        "/etc/sagellm/fleet.yaml",
        "--instance",
        "decode-$(INSTANCE_NUMBER)",
    ]
    assert group_of(arguments[-1].replace("$(INSTANCE_NUMBER)", "2"), resolved.config.fleet) == "decode"


def test_resources_are_those_of_the_group(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
    limits = {
        name: container(objects["StatefulSet", f"sagellm-{name}"])["resources"].get("limits")
        for name in ("prefill", "decode", "cpu")
    }
    assert limits == {
        "prefill": {"nvidia.com/gpu": 2},
        "decode": {"nvidia.com/gpu": 1, "cpu": 4},
        "cpu": {"cpu": 2, "memory": "1536Mi"},
    }


def test_the_front_is_probed_by_its_routes_and_has_its_secrets(
    objects: dict[tuple[str, str], dict[str, Any]],
) -> None:
    front = container(objects["Deployment", "sagellm-front"])
    routes = [
        front[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    ]
    assert routes == ["/health", "/ready", "/health"]
    variables = {each["name"]: each for each in front["env"]}
    assert {name for name, each in variables.items() if "valueFrom" in each} == {
        KEY_VARIABLE, "SAGELLM_SERVER_API_KEY", "VLLM_KEY",
    }  # fmt: skip
    known = {KEY_VARIABLE: "k" * 16, "SAGELLM_SERVER_HOST": "0.0.0.0", "SAGELLM_SERVER_PORT": "1"}
    assert load_config(environ=known).config.server.host == "0.0.0.0"


def test_no_manifest_holds_a_key(objects: dict[tuple[str, str], dict[str, Any]], tmp_path: Path) -> None:
    assert objects["Secret", SECRET]["stringData"] == {KEY_VARIABLE: PLACEHOLDER}
    with pytest.raises(ConfigError, match="too short"):
        load_config(environ={KEY_VARIABLE: PLACEHOLDER})
    secret = read(tmp_path / "s.yaml", "fleet: {shared_key: 0123456789abcdef, groups: {a: {}}}")
    with pytest.raises(ConfigError, match="no place for secrets"):
        manifests(secret, ManifestOptions())


def test_groups_that_are_gone_have_no_file(resolved: Resolved, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_manifests(resolved, folder, ManifestOptions())
    one = read(tmp_path / "one.yaml", "fleet: {groups: {only: {}}}")
    write_manifests(one, folder, ManifestOptions())
    assert [path.name for path in sorted(folder.glob("group-*"))] == ["group-only.yaml"]
    with pytest.raises(ConfigError, match="has no fleet.groups"):
        manifests(read(tmp_path / "none.yaml", ""), ManifestOptions())


def test_another_file_restarts_the_pods(resolved: Resolved, tmp_path: Path) -> None:
    def digests(given: Resolved) -> set[str]:
        objects = [each for file in manifests(given, ManifestOptions()).values() for each in file]
        templates = [each["spec"]["template"] for each in objects if "template" in each.get("spec", {})]
        return {template["metadata"]["annotations"]["sagellm/fleet-file"] for template in templates}

    other = read(tmp_path / "other.yaml", FILE.replace("num_blocks: 100", "num_blocks: 101"))
    assert len(digests(resolved)) == 1
    assert digests(resolved) != digests(other)


def test_the_manifests_in_the_repository_are_up_to_date(tmp_path: Path) -> None:
    """To make them: sagellm fleet manifests deploy/fleet.yaml --out deploy"""
    made = write_manifests(load_config(DEPLOY / "fleet.yaml", environ={}), tmp_path, ManifestOptions())
    for path in made:
        assert (DEPLOY / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), path.name
    assert {path.name for path in DEPLOY.iterdir()} == {path.name for path in made} | {
        "fleet.yaml",
        "README.md",
    }
