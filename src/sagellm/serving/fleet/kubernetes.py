"""Kubernetes manifests of a fleet file: a StatefulSet for each group, a Deployment for the front.

Group `decode` becomes a StatefulSet `sagellm-decode` with a headless Service, so each instance has a host
name of its own; the ConfigMap holds the fleet file with these names as `addresses`. The shared key comes from
a Secret that these files only name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from sagellm.control_plane.fleet_instances import check_groups, instance_config
from sagellm.core.config import SECRET_KEYS
from sagellm.core.config_layers import DEFAULT_ORIGIN, Resolved
from sagellm.core.errors import ConfigError
from sagellm.core.fleet_config import GroupConfig
from sagellm.core.ports import SagePorts

Manifest: TypeAlias = dict[str, Any]

APP = "sagellm"
SECRET = "sagellm-fleet"
KEY_VARIABLE, API_KEY_VARIABLE = "SAGELLM_FLEET_SHARED_KEY", "SAGELLM_SERVER_API_KEY"
FOLDER, FILE = "/etc/sagellm", "fleet.yaml"
PLACEHOLDER = "CHANGE-ME"
"""Shorter than a key may be, so that a fleet with it does not start."""
EXTRA_GRACE_S = 10
_EXAMPLE = f"""# kubectl create secret generic {SECRET} --from-literal={KEY_VARIABLE}=$(openssl rand -hex 32)
# does the same. {API_KEY_VARIABLE} is optional: the key that clients send.
"""


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """`image`: with sageLLM and its extra serve. `namespace`: empty for kubectl's own. `chip_resource`: what
    the cluster's device plugin calls a chip."""

    image: str = "sagellm:latest"
    namespace: str = ""
    chip_resource: str = "nvidia.com/gpu"


def write_manifests(resolved: Resolved, folder: Path, options: ManifestOptions) -> list[Path]:
    """Write the files into `folder`, and an example of the Secret, which kubectl skips by its name.

    Files of groups that the fleet file no longer has are removed. Raises `ConfigError` for a fleet file that
    cannot be deployed, and if a file cannot be written.
    """
    texts = {
        name: yaml.safe_dump_all(objects, sort_keys=False)
        for name, objects in manifests(resolved, options).items()
    }
    secret = yaml.safe_dump(_object("Secret", "v1", SECRET, options, stringData={KEY_VARIABLE: PLACEHOLDER}))
    texts["secret.yaml.example"] = _EXAMPLE + secret
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in set(folder.glob("group-*.yaml")) - {folder / name for name in texts}:
            stale.unlink()
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: manifests cannot be written there: {error}") from error
    return [folder / name for name in texts]


def manifests(resolved: Resolved, options: ManifestOptions) -> dict[str, list[Manifest]]:
    """The objects of each file, by its name."""
    fleet = resolved.config.fleet
    if not fleet.groups:
        raise ConfigError("the file has no fleet.groups: a fleet file names its instances")
    secrets = sorted(key for key in SECRET_KEYS if resolved.origins[key] != DEFAULT_ORIGIN)
    if secrets:
        names = ", ".join(secrets)
        raise ConfigError(f"{names}: a ConfigMap is no place for secrets; leave them to the Secret {SECRET}")
    check_groups(resolved)
    text = yaml.safe_dump(_fleet_file(resolved), sort_keys=False)
    config = _object("ConfigMap", "v1", f"{APP}-fleet", options, data={FILE: text})
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    found = {"configmap.yaml": [config], "front.yaml": _front(resolved, options, digest)}
    for name, group in fleet.groups.items():
        if group.is_local:
            found[f"group-{name}.yaml"] = _group(resolved, name, options, digest)
    return found


def _fleet_file(resolved: Resolved) -> dict[str, Any]:
    """The keys that were given, with the addresses that instances have in the cluster."""
    given: dict[str, Any] = resolved.config.model_dump(mode="json", exclude_unset=True)
    fleet = given["fleet"]
    fleet.pop("shared_key_file", None)
    fleet.pop("chips_file", None)
    for name, group in resolved.config.fleet.groups.items():
        if group.is_local:
            host = f"{APP}-{name}"
            addresses = [
                f"tcp://{host}-{i}.{host}:{int(SagePorts.INSTANCE)}" for i in range(group.num_instances)
            ]
            kept = {
                key: fleet["groups"][name][key]
                for key in ("type", "settings")
                if key in fleet["groups"][name]
            }
            # without addresses it would count as one instance that the front starts
            fleet["groups"][name] = {**kept, "addresses": addresses} if addresses else {**kept, "count": 0}
    return given


def _front(resolved: Resolved, options: ManifestOptions, digest: str) -> list[Manifest]:
    config = resolved.config
    port = int(SagePorts.HTTP)
    variables = [
        {"name": "SAGELLM_SERVER_HOST", "value": "0.0.0.0"},
        {"name": "SAGELLM_SERVER_PORT", "value": str(port)},
        _secret(API_KEY_VARIABLE, is_optional=True),
    ]
    servers = [server for group in config.fleet.groups.values() for server in group.servers]
    variables += [_secret(name) for name in dict.fromkeys(s.api_key_variable for s in servers) if name]
    container = _container(
        "front", options, ["serve", "--config", f"{FOLDER}/{FILE}"], variables, {"http": port}
    )
    container |= {
        "startupProbe": _probe(
            {"httpGet": {"path": "/health", "port": "http"}}, config.fleet.start_timeout_s
        ),
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 2},
        "livenessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5},
    }
    name = f"{APP}-front"
    deployment = _object(
        "Deployment", "apps/v1", name, options,
        spec={
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # instances obey one front
            "selector": {"matchLabels": _labels(name)},
            "template": _pod(name, container, config.server.shutdown_grace_s, digest),
        },
    )  # fmt: skip
    service = _object(
        "Service", "v1", APP, options,
        spec={"selector": _labels(name), "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    )  # fmt: skip
    return [deployment, service]


def _group(resolved: Resolved, group_name: str, options: ManifestOptions, digest: str) -> list[Manifest]:
    fleet = resolved.config.fleet
    group, name = fleet.groups[group_name], f"{APP}-{group_name}"
    number = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    container = _container(
        "instance", options,
        ["serve", "--config", f"{FOLDER}/{FILE}", "--instance", f"{group_name}-$(INSTANCE_NUMBER)"],
        [{"name": "INSTANCE_NUMBER", "valueFrom": number}],
        {"instance": int(SagePorts.INSTANCE)},
    )  # fmt: skip
    container["resources"] = _resources(resolved, group_name, group, options)
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    listens = {"tcpSocket": {"port": "instance"}}
    container |= {
        "startupProbe": _probe(listens, fleet.start_timeout_s),
        "livenessProbe": {**listens, "periodSeconds": 5},
    }
    pod = _pod(name, container, fleet.drain_timeout_s, digest)
    pod["spec"]["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    pod["spec"]["subdomain"] = name
    stateful = _object(
        "StatefulSet", "apps/v1", name, options,
        spec={
            "serviceName": name,
            "replicas": group.num_instances,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _labels(name)},
            "template": pod,
        },
    )  # fmt: skip
    service = _object(
        "Service", "v1", name, options,
        spec={
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the front itself finds out which instances serve
            "selector": _labels(name),
            "ports": [{"name": "instance", "port": int(SagePorts.INSTANCE)}],
        },
    )  # fmt: skip
    return [stateful, service]


def _resources(
    resolved: Resolved, name: str, group: GroupConfig, options: ManifestOptions
) -> dict[str, dict[str, Any]]:
    config = instance_config(resolved, name)
    on_cpu = config.model.device == "cpu"
    num_chips = group.chips if group.chips is not None else 0 if on_cpu else config.parallel.num_ranks
    limits: dict[str, Any] = {}
    if num_chips:
        limits[options.chip_resource] = num_chips
    if group.cores is not None:
        limits["cpu"] = group.cores
    if group.memory_gb is not None and not num_chips:
        limits["memory"] = f"{math.ceil(group.memory_gb * 1024)}Mi"
    return {"requests": dict(limits), "limits": limits} if limits else {}


def _container(
    name: str,
    options: ManifestOptions,
    arguments: list[str],
    variables: Iterable[Manifest],
    ports: dict[str, int],
) -> Manifest:
    return {
        "name": name,
        "image": options.image,
        "command": ["sagellm"],
        "args": arguments,
        "env": [*variables, _secret(KEY_VARIABLE)],
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        "volumeMounts": [{"name": "config", "mountPath": FOLDER, "readOnly": True}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _pod(name: str, container: Manifest, grace_s: float, digest: str) -> Manifest:
    """A template. The digest of the fleet file restarts pods when it changes."""
    return {
        "metadata": {"labels": _labels(name), "annotations": {f"{APP}/fleet-file": digest}},
        "spec": {
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": math.ceil(grace_s) + EXTRA_GRACE_S,
            "containers": [container],
            "volumes": [{"name": "config", "configMap": {"name": f"{APP}-fleet"}}],
        },
    }


def _probe(check: Manifest, limit_s: float, period_s: int = 5) -> Manifest:
    return {**check, "periodSeconds": period_s, "failureThreshold": math.ceil(limit_s / period_s)}


def _secret(variable: str, *, is_optional: bool = False) -> Manifest:
    reference = {"name": SECRET, "key": variable, "optional": is_optional}
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": APP, "app.kubernetes.io/component": name}


def _object(kind: str, version: str, name: str, options: ManifestOptions, **body: Any) -> Manifest:
    metadata: dict[str, Any] = {"name": name, "labels": _labels(name)}
    if options.namespace:
        metadata["namespace"] = options.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}
