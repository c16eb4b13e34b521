"""The examples for running brokers, and what the pages about it state: units, images, commands, figures."""

from __future__ import annotations

import ast
import configparser
import json
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
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(UNIT, encoding="utf-8")
    return dict(parser["Service"])


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
    services = re.findall(r"^  ([\w-]+):\n(.*?)(?=^\S|^  \w|\Z)", COMPOSE, re.MULTILINE | re.DOTALL)
    commands = {name: json.loads(found[1]) for name, body in services if (found := _command(body))}
    assert set(commands) == {"migrate", "mq-1", "mq-2"}
    for name, words in commands.items():
        assert unknown_words(shlex.join(["postroom", *words])) == []
        if words[0] == "serve":
            assert words[words.index("--advertise") + 1] == f"{name}:{DEFAULT.port}"
    (clients,) = re.findall(r"postroom://(\S+)", COMPOSE)
    assert clients.split(",") == [f"{name}:{DEFAULT.port}" for name in ("mq-1", "mq-2")]
    for shown in re.findall(r"run --rm mq-1 (.+)", COMPOSE):
        assert unknown_words(f"postroom {shown}") == []
    assert (EXAMPLES / "../..").resolve() == ROOT  # its build context


def _command(body: str) -> re.Match[str] | None:
    return re.search(r"^    command: (\[.*\])$", body, re.MULTILINE)


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
    for name in ("postroom.service", "Containerfile", "compose.yaml"):
        assert f"(../examples/{name})" in text
