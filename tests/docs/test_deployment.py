"""The examples for running brokers, and what the pages about it state: units, images, commands, figures."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from postroom.cli.checks.server import per_process
from postroom.config import DEFAULTS
from postroom.http.app import HttpLimits
from postroom.serve_settings import ServeSettings, key_of, read_settings
from postroom.wire.server.listening import Listening
from tests.docs.deployed import compose, containers, manifests
from tests.docs.pages import ROOT, table
from tests.docs.test_reference import unknown_words

EXAMPLES = ROOT / "docs" / "examples"
HOWTO = ROOT / "docs" / "howto"
UNIT = EXAMPLES / "postroom.service"
CONTAINER = (EXAMPLES / "Containerfile").read_text(encoding="utf-8")
COMPOSE = (EXAMPLES / "compose.yaml").read_text(encoding="utf-8")
DEFAULT = read_settings({}, {}, None)
SETTINGS = {f"POSTROOM_SERVE_{key_of(name).upper()}" for name in ServeSettings.__dataclass_fields__}


# ---- the unit ----


def unit() -> dict[str, str]:
    return read_service(UNIT)


def test_the_unit_stops_gently_and_has_room() -> None:
    service, settings = unit(), DEFAULT
    assert int(service["TimeoutStopSec"]) * 1000 >= settings.grace_ms + 10_000
    assert service["KillSignal"] == "SIGTERM" and service["Restart"] == "always"
    assert int(service["LimitNOFILE"]) > settings.max_connections + 1000 + 100
    assert service["StateDirectory"] == "postroom" and service["User"] == "postroom"
    assert service["EnvironmentFile"] and service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes" and service["CapabilityBoundingSet"] == ""


def test_the_unit_runs_a_command_with_settings_that_there_are() -> None:
    words = shlex.split(unit()["ExecStart"])
    assert words[0].endswith("/postroom")
    assert unknown_words(shlex.join(["postroom", *words[1:]])) == []
    assert set(re.findall(r"POSTROOM_SERVE_\w+", UNIT.read_text(encoding="utf-8"))) <= SETTINGS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With the key as a credential, too, and a program that is there."""
    text = UNIT.read_text(encoding="utf-8").replace("#LoadCredential", "LoadCredential")
    text = text.replace("#Environment=POSTROOM_SERVE_TLS_KEY", "Environment=POSTROOM_SERVE_TLS_KEY")
    path = tmp_path / "postroom.service"
    path.write_text(text.replace("/opt/postroom/bin/postroom", sys.executable), encoding="utf-8")
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


# ---- the image ----


def instructions() -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", CONTAINER, flags=re.MULTILINE))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def test_the_image_can_be_made_of_what_is_here() -> None:
    copied = [rest.split()[:-1] for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    assert copied and all((ROOT / source).exists() for sources in copied for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"/src\[([\w,]+)\]", CONTAINER)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (files,) = [sources for sources in copied if "pyproject.toml" in sources]
    assert {"constraints.txt", *project["license-files"]} <= set(files)


def test_the_image_runs_commands_that_there_are() -> None:
    words = dict(instructions())
    command = ["postroom", *json.loads(words["CMD"])]
    assert json.loads(words["ENTRYPOINT"]) == ["postroom"] and unknown_words(shlex.join(command)) == []
    assert set(re.findall(r"POSTROOM_SERVE_\w+", words["ENV"])) <= SETTINGS
    for word, rest in instructions():
        if word == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True, timeout=60)
    python, _, program = json.loads(words["HEALTHCHECK"].partition("CMD ")[2])
    assert python == "python" and f":{DEFAULT.http_port}/health" in program
    ast.parse(program)


def test_the_brokers_of_the_compose_file_can_be_found_by_name() -> None:
    services = compose(EXAMPLES / "compose.yaml").services
    commands = {name: service.command for name, service in services.items() if service.command}
    assert set(commands) == {"migrate", "mq-1", "mq-2"}
    for name, words in commands.items():
        assert unknown_words(shlex.join(["postroom", *words])) == []
        if words[0] == "serve":
            assert words[words.index("--advertise") + 1] == f"{name}:{DEFAULT.port}"
    (clients,) = re.findall(r"postroom://(\S+)", COMPOSE)
    assert clients.split(",") == [f"{name}:{DEFAULT.port}" for name in ("mq-1", "mq-2")]
    for shown in re.findall(r"run --rm mq-1 (.+)", COMPOSE):
        assert unknown_words(f"postroom {shown}") == []


@pytest.mark.parametrize("name", ["compose.yaml", "compose-workers.yaml"])
def test_compose_files_build_what_is_here(name: str) -> None:
    built = [one.build for one in compose(EXAMPLES / name).services.values() if one.build is not None]
    assert built
    for build in built:
        context = (EXAMPLES / build.context).resolve()
        assert context == ROOT and (context / build.dockerfile).exists()


@pytest.mark.parametrize("name", ["compose.yaml", "compose-workers.yaml"])
def test_docker_takes_the_compose_files(name: str) -> None:
    command = ["docker", "compose"]
    if (
        shutil.which("docker") is None
        or subprocess.run([*command, "version"], capture_output=True).returncode
    ):
        pytest.skip("there is no docker compose here")
    env = os.environ | {"POSTGRES_PASSWORD": "secret"}
    shown = [*command, "-f", str(EXAMPLES / name), "--profile", "*", "config", "--quiet"]
    ran = subprocess.run(shown, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


# ---- workers ----


WORKER = EXAMPLES / "postroom-worker.service"
GRACE_S = 30  # of an App


def read_service(path: Path) -> dict[str, str]:
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(path, encoding="utf-8")
    return dict(parser["Service"])


def test_the_unit_of_a_worker_stops_gently_and_runs_a_command_that_there_is() -> None:
    service = read_service(WORKER)
    words = shlex.split(service["ExecStart"])
    assert words[0].endswith("/postroom") and unknown_words(shlex.join(["postroom", *words[1:]])) == []
    assert int(service["TimeoutStopSec"]) > GRACE_S + 10 and service["KillMode"] == "mixed"
    assert service["Restart"] == "always" and service["NoNewPrivileges"] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit_of_a_worker(tmp_path: Path) -> None:
    text = WORKER.read_text(encoding="utf-8").replace("/srv/shop/venv/bin/postroom", sys.executable)
    path = tmp_path / "postroom-worker.service"
    path.write_text(text.replace("/srv/shop", str(tmp_path)), encoding="utf-8")
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_worker_in_compose_is_asked_where_it_answers_and_may_finish() -> None:
    services = compose(EXAMPLES / "compose-workers.yaml").services
    worker = services["worker"]
    assert worker.healthcheck is not None
    program = worker.healthcheck.test[-1]
    ast.parse(program)
    assert f"127.0.0.1:{http_port(worker.command)}/readyz" in program
    assert int(worker.stop_grace_period.removesuffix("s")) > GRACE_S + 10
    assert unknown_words(shlex.join(["postroom", *services["migrate"].command])) == []


def http_port(words: list[str]) -> int:
    """Of a worker whose command there is, and which is asked from outside."""
    assert words[0] == "worker" and unknown_words(shlex.join(["postroom", *words])) == []
    assert words[words.index("--http-host") + 1] == "0.0.0.0"
    return int(words[words.index("--http-port") + 1])


# ---- Kubernetes ----


KUBERNETES = EXAMPLES / "kubernetes.yaml"


def test_a_worker_in_kubernetes_is_asked_where_it_answers_and_may_finish() -> None:
    pod, worker = containers(KUBERNETES)["worker"]
    port = http_port(worker.args)
    assert worker.liveness_probe is not None and worker.readiness_probe is not None
    asked = [worker.liveness_probe.http_get, worker.readiness_probe.http_get]
    assert [(one.path, one.port) for one in asked] == [("/healthz", port), ("/readyz", port)]
    assert [one.container_port for one in worker.ports] == [port]
    assert pod.termination_grace_period_seconds > GRACE_S + 10


def test_the_brokers_of_kubernetes_are_named_as_clients_name_them() -> None:
    pod, broker = containers(KUBERNETES)["broker"]
    assert unknown_words(shlex.join(["postroom", *broker.args])) == []
    assert broker.args[broker.args.index("--advertise") + 1] == f"$(POD).postroom:{DEFAULT.port}"
    named = ",".join(f"postroom-{n}.postroom:{DEFAULT.port}" for n in range(2))
    assert f"postroom://{named}" in KUBERNETES.read_text(encoding="utf-8")
    assert broker.liveness_probe is not None and broker.readiness_probe is not None
    asked = [broker.liveness_probe.http_get, broker.readiness_probe.http_get]
    assert [(one.path, one.port) for one in asked] == [(p, DEFAULT.http_port) for p in ("/health", "/ready")]
    assert pod.termination_grace_period_seconds * 1000 > DEFAULT.grace_ms


def test_kubernetes_finds_the_pods_of_what_it_runs() -> None:
    """A selector that does not fit is refused only by the cluster, and a service without pods by nobody."""
    found = {one.metadata.name: one.spec for one in manifests(KUBERNETES)}
    for one in manifests(KUBERNETES):
        if one.kind in ("Deployment", "StatefulSet"):
            assert one.spec.selector.match_labels == one.spec.template.metadata.labels
    brokers = [one.spec for one in manifests(KUBERNETES) if one.kind == "StatefulSet"]
    (service,) = [one for one in manifests(KUBERNETES) if one.kind == "Service"]
    for spec in brokers:
        assert spec.service_name == service.metadata.name and spec.service_name in found
        assert service.spec.selector == spec.template.metadata.labels
    assert {one.port for one in service.spec.ports} == {DEFAULT.port, DEFAULT.http_port}


def test_the_secret_is_made_with_the_keys_that_are_read() -> None:
    text = KUBERNETES.read_text(encoding="utf-8")
    (made,) = re.findall(r"kubectl create secret generic (.+)", text)
    name, keys = made.split()[0], set(re.findall(r"--from-literal=(\w+)=", made))
    refs = [
        env.value_from.secret_key_ref
        for _, container in containers(KUBERNETES).values()
        for env in container.env
        if env.value_from is not None and env.value_from.secret_key_ref is not None
    ]
    assert {ref.name for ref in refs} == {name} and {ref.key for ref in refs} == keys


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("readinessProbe:", "readynessProbe:"),
        ("port: 7071}", 'port: "7071"}'),
        ("replicas: 2", "replicas: two"),
        ("replicas: 2", "replicas: 2\n  replicas: 3"),
        ("apps/v1", "apps/v1beta1"),
        ("serviceName: postroom", "service: postroom"),
    ],
)
def test_a_mistake_in_a_manifest_is_found(tmp_path: Path, right: str, wrong: str) -> None:
    text = KUBERNETES.read_text(encoding="utf-8")
    assert right in text
    path = tmp_path / "wrong.yaml"
    path.write_text(text.replace(right, wrong, 1), encoding="utf-8")
    with pytest.raises((AssertionError, KeyError, ValueError)):
        manifests(path)


# ---- figures ----


def test_the_connections_are_counted_as_doctor_counts_them() -> None:
    rows = table(HOWTO / "sizing.md", "Connections of the database")
    *parts, (_, postgres, mariadb) = [[cell.strip("*") for cell in row] for row in rows]
    assert int(postgres) == per_process(DEFAULTS, wakes=True) == sum(int(row[1]) for row in parts)
    assert int(mariadb) == per_process(DEFAULTS, wakes=False) == sum(int(row[2] or 0) for row in parts)


def test_the_bounds_of_memory_exist() -> None:
    text = (HOWTO / "sizing.md").read_text(encoding="utf-8")
    for name in re.findall(r"^\| (?:broker|producer|consumer): .*?\| `(\w+)`", text, re.MULTILINE):
        assert hasattr(DEFAULTS, name)
    each, every = Listening().request_bytes >> 20, Listening().all_request_bytes >> 20
    assert f"| {each} MB each connection, {every} MB all |" in text
    answers = Listening()
    parts = (answers.answer_bytes >> 20, answers.all_answer_bytes >> 21, answers.all_answer_bytes >> 20)
    assert "| {} MB each connection, {} MB each principal, {} MB all (`answers`) |".format(*parts) in text
    assert f"bodies over HTTP | {HttpLimits().all_bodies_bytes >> 20} MB |" in text
    assert f"each partition of such a topic: {DEFAULTS.dedup_ids * 16 // 10**6} MB" in text


def test_the_examples_are_linked() -> None:
    text = (HOWTO / "deployment.md").read_text(encoding="utf-8")
    names = ("postroom.service", "Containerfile", "compose.yaml", WORKER.name)
    for name in (*names, "compose-workers.yaml", "kubernetes.yaml"):
        assert f"(../examples/{name})" in text
