"""What is shipped for running jobs elsewhere: the image, the manifests, and the examples for schedulers."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.deployed import containers, manifests
from tests.docs.pages import ROOT
from tests.docs.test_reference import unknown_words

DEPLOY = ROOT / "deploy" / "spark"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
MANIFESTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(DEPLOY.glob("*.yaml"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
AIRFLOW = ROOT / "examples" / "airflow_dag" / "postroom_archive.py"
DAGSTER = ROOT / "examples" / "dagster_job" / "postroom_archive.py"
JOBS = sorted((DEPLOY / "jobs").glob("*.py"))


def commands(manifest: str) -> list[list[str]]:
    return [json.loads(found) for found in re.findall(r"command: (\[.*\])", manifest)]


def test_the_image_has_what_the_project_asks_for() -> None:
    (python,) = re.findall(r"library/python:3\.(\d+)-slim", DOCKERFILE)
    assert int(python) >= int(PROJECT["requires-python"].removeprefix(">=3."))
    assert f"/python3.{python}/site-packages/pyspark" in DOCKERFILE
    (extras,) = re.findall(r"'/src\[(.+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / name).exists() for name in copied.split())


def test_manifests_run_what_is_there() -> None:
    run = [words for manifest in MANIFESTS.values() for words in commands(manifest)]
    ours = [words[words.index("postroom") :] for words in run if "postroom" in words]
    assert ours and all(unknown_words(shlex.join(words)) == [] for words in ours)
    scripts = re.findall(r"/opt/jobs/(\w+\.py)", "".join(MANIFESTS.values()))
    assert sorted(scripts) == [job.name for job in JOBS]
    versions = re.findall(r'sparkVersion: "(.+)"', "".join(MANIFESTS.values()))
    assert [f"pyspark=={version}" for version in versions] == [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("pyspark==")
    ]


def test_claims_and_pods_of_the_manifests_fit_each_other() -> None:
    for path in sorted(DEPLOY.glob("*.yaml")):
        made = {one.metadata.name for one in manifests(path) if one.kind == "PersistentVolumeClaim"}
        for pod, container in containers(path).values():
            volumes = {one.name: one.persistent_volume_claim.claim_name for one in pod.volumes}
            assert set(volumes.values()) <= made
            assert {mount.name for mount in container.volume_mounts} <= set(volumes)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_of_one_image_and_say_what_they_need(name: str) -> None:
    manifest = MANIFESTS[name]
    (built,) = re.findall(r"-t (\S+) \.", DOCKERFILE)
    assert set(re.findall(r"image: (\S+)", manifest)) == {built}
    assert "secretKeyRef: {name: postroom, key: token}" in manifest and "memory:" in manifest
    claims = set(re.findall(r"claimName: (\w+)", manifest))
    assert claims == set(re.findall(r"kind: PersistentVolumeClaim\nmetadata:\n  name: (\w+)", manifest))
    assert "pst_" not in manifest.replace("token=pst_…", "")


@pytest.mark.parametrize(
    "path", [AIRFLOW, DAGSTER, *JOBS], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_what_they_import_of_ours_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("postroom"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)


STAND_IN = """
import sys, types, json
commands = []
class DAG:
    def __init__(self, *args, **options): assert options["max_active_runs"] == 1 and not options["catchup"]
    def __enter__(self): return self
    def __exit__(self, *error): return None
class BashOperator:
    def __init__(self, *, task_id, bash_command): commands.append(bash_command)
    def __rshift__(self, other): return other
for name in ("airflow", "airflow.sdk", "airflow.providers", "airflow.providers.standard",
             "airflow.providers.standard.operators", "airflow.providers.standard.operators.bash"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["airflow.sdk"].DAG = DAG
sys.modules["airflow.providers.standard.operators.bash"].BashOperator = BashOperator
import runpy
runpy.run_path(sys.argv[1])
print(json.dumps(commands))
"""


def test_commands_of_the_airflow_example_are_there() -> None:
    """Airflow itself is not installed for the tests; what the file hands to it is looked at."""
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN, str(AIRFLOW)], capture_output=True, text=True, check=True, timeout=60
    )
    found = [line.replace("${POSTROOM_BIN:-postroom}", "postroom") for line in json.loads(done.stdout)]
    assert len(found) == 3 and [unknown_words(line) for line in found] == [[]] * 3
