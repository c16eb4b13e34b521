"""The manifests that are shipped, read by a real parser, and as strictly as by those who will read them.

A field that is misspelt, is in the wrong place or has the wrong type is an error. The types have the fields
that are used; look a new one up in Kubernetes' reference, or in the specification of Compose, and add it
here. All of them were checked once against Kubernetes' own schemas (1.31), and by the library with which
`docker compose` loads files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

__all__ = ["Compose", "Container", "Service", "compose", "containers", "documents", "manifests"]


class Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pass


# ---- Kubernetes ----


class Meta(Strict):
    name: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Ref(Strict):
    name: str
    key: str


class Field(Strict):
    field_path: str


class Source(Strict):
    secret_key_ref: Ref | None = None
    field_ref: Field | None = None


class Env(Strict):
    name: str
    value: str | None = None
    value_from: Source | None = None


class Port(Strict):
    container_port: int
    name: str | None = None


class HttpGet(Strict):
    path: str
    port: int


class Probe(Strict):
    http_get: HttpGet
    period_seconds: int = 10
    timeout_seconds: int = 1
    failure_threshold: int = 3


class Resources(Strict):
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}


class Mount(Strict):
    name: str
    mount_path: str
    read_only: bool = False


class Container(Strict):
    name: str
    image: str
    command: list[str] = []
    args: list[str] = []
    env: list[Env] = []
    ports: list[Port] = []
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    resources: Resources | None = None
    volume_mounts: list[Mount] = []


class Claim(Strict):
    claim_name: str


class Volume(Strict):
    name: str
    persistent_volume_claim: Claim


class Security(Strict):
    run_as_user: int
    run_as_non_root: bool
    run_as_group: int | None = None
    fs_group: int | None = None


class Pod(Strict):
    containers: list[Container]
    termination_grace_period_seconds: int = 30
    restart_policy: Literal["Always", "OnFailure", "Never"] = "Always"
    security_context: Security | None = None
    volumes: list[Volume] = []


class Template(Strict):
    spec: Pod
    metadata: Meta = msgspec.field(default_factory=Meta)


class Selector(Strict):
    match_labels: dict[str, str]


class Strategy(Strict):
    type: Literal["Recreate", "RollingUpdate"]


class DeploymentSpec(Strict):
    replicas: int
    selector: Selector
    template: Template
    strategy: Strategy | None = None


class StatefulSetSpec(Strict):
    service_name: str
    replicas: int
    selector: Selector
    template: Template
    pod_management_policy: Literal["OrderedReady", "Parallel"] = "OrderedReady"


class JobSpec(Strict):
    template: Template
    backoff_limit: int = 6


class JobTemplate(Strict):
    spec: JobSpec


class CronJobSpec(Strict):
    schedule: str
    job_template: JobTemplate
    concurrency_policy: Literal["Allow", "Forbid", "Replace"] = "Allow"


class ServicePort(Strict):
    name: str
    port: int


class ServiceSpec(Strict):
    selector: dict[str, str]
    ports: list[ServicePort]
    cluster_ip: str | None = msgspec.field(name="clusterIP", default=None)


class ClaimSpec(Strict):
    access_modes: list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"]]
    resources: dict[Literal["requests"], dict[Literal["storage"], str]]


SPECS: dict[tuple[str, str], Any] = {
    ("v1", "Service"): ServiceSpec,
    ("v1", "PersistentVolumeClaim"): ClaimSpec,
    ("apps/v1", "Deployment"): DeploymentSpec,
    ("apps/v1", "StatefulSet"): StatefulSetSpec,
    ("batch/v1", "CronJob"): CronJobSpec,
    ("sparkoperator.k8s.io/v1beta2", "SparkApplication"): dict,  # of an operator, which has no schema here
}


class Manifest(Strict):
    api_version: str
    kind: str
    metadata: Meta
    spec: Any


def documents(path: Path) -> list[Any]:
    """What is in a file of YAML. A key that occurs twice is an error, though PyYAML takes the last."""
    return list(yaml.load_all(path.read_text(encoding="utf-8"), _Loader))


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{twice} occurs twice{node.start_mark}"
        return super().construct_mapping(node, deep)


def manifests(path: Path) -> list[Manifest]:
    """Kubernetes' objects of a file, with their `spec` typed."""
    found = [msgspec.convert(one, Manifest) for one in documents(path)]
    for one in found:
        one.spec = msgspec.convert(one.spec, SPECS[one.api_version, one.kind])
    return found


def containers(path: Path) -> dict[str, tuple[Pod, Container]]:
    """By name, with the pod that each is in."""
    pods = [pod for one in manifests(path) if (pod := _pod(one.spec)) is not None]
    return {one.name: (pod, one) for pod in pods for one in pod.containers}


def _pod(spec: Any) -> Pod | None:
    if isinstance(spec, CronJobSpec):
        return spec.job_template.spec.template.spec
    return spec.template.spec if isinstance(spec, DeploymentSpec | StatefulSetSpec) else None


# ---- Compose ----


class Snake(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Build(Snake):
    context: str
    dockerfile: str


class Healthcheck(Snake):
    test: list[str]
    interval: str = "30s"
    start_period: str = "0s"


class Needs(Snake):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]


class Service(Snake):
    image: str
    build: Build | None = None
    command: list[str] = []
    environment: dict[str, str] = {}
    volumes: list[str] = []
    healthcheck: Healthcheck | None = None
    depends_on: dict[str, Needs] = {}
    profiles: list[str] = []
    restart: Literal["no", "always", "on-failure", "unless-stopped"] = "no"
    stop_grace_period: str = "10s"
    ulimits: dict[str, int] = {}
    working_dir: str | None = None


class Compose(Snake):
    name: str
    services: dict[str, Service]
    volumes: dict[str, None] = {}


def compose(path: Path) -> Compose:
    (only,) = documents(path)
    found = msgspec.convert(only, Compose)
    for service in found.services.values():
        assert set(service.depends_on) <= set(found.services)
        for mounted in service.volumes:
            source = mounted.partition(":")[0]
            assert re.match(r"[./]", source) or source in found.volumes, f"no volume is called {source}"
    return found
