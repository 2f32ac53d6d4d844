"""`sagellm fleet manifests`: a fleet file as objects of Kubernetes."""

from __future__ import annotations

from pathlib import Path

from sagellm.cli._options import argument, command, flag


@command
def manifests(
    config: Path = argument("FILE", "Fleet file.", ...),
    directory: Path = flag("--out -o FOLDER", "Where to write them.", Path("deploy")),
    image: str = flag("NAME", "Container image with sageLLM.", "sagellm:latest"),
    namespace: str | None = flag("NAME", "Namespace of all objects; none: kubectl's."),
) -> None:
    """Write Kubernetes manifests for a fleet file: plain YAML for `kubectl apply -f FOLDER`."""
    from sagellm.engines.build import load_config
    from sagellm.serving.fleet.kubernetes import ManifestOptions, write_manifests

    resolved = load_config(config, environ={})
    for path in write_manifests(resolved, directory, ManifestOptions(image, namespace or "")):
        print(path)
