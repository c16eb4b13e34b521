"""Runs `postroom` for tests: in this process with Typer's runner, or as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from postroom.cli.root import app

__all__ = ["Answer", "Cli"]

SECONDS = 60


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(self.err.splitlines()[-1])
        return found


class Cli:
    """A queue, in a folder unless it is named, and the command line on it."""

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.folder = folder
        self.url = url or f"sqlite:///{folder / 'queue.db'}"

    def __call__(self, *words: str, stdin: str | bytes = "") -> Answer:
        env = {"POSTROOM_URL": self.url, "NO_COLOR": "1"}
        result = CliRunner().invoke(app, list(words), input=stdin, env=env, prog_name="postroom")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    def ok(self, *words: str, stdin: str | bytes = "") -> Answer:
        answer = self(*words, stdin=stdin)
        assert answer.code == 0, f"postroom {' '.join(words)}: {answer}"
        return answer

    def findings(self, *words: str) -> dict[str, dict[str, str]]:
        """What the doctor finds, by check; its exit code and `ok` say whether one of them fails."""
        answer = self("doctor", "--json", *words)
        found = {check["check"]: check for check in answer.json["checks"]}
        failed = any(check["state"] == "fail" for check in found.values())
        assert answer.code == (1 if failed else 0) and answer.json["ok"] is not failed
        return found

    def read_all(self, topic: str, group: str) -> list[str]:
        """Consume until nothing waits, the seals of partitions included; what was printed."""
        found: list[str] = []
        for _ in range(40):
            found += self.ok("consume", topic, "-g", group, "--create", "--wait", "500ms").out.split()
            route = self.ok("route", "show", topic, "--group", group, "--json").json
            if not (route["groups"][0]["to_read"] or route["groups"][0]["waiting"]):
                return found
        raise AssertionError(f"group {group} never came to an end: {route}")

    def start(self, *words: str, **settings: Any) -> subprocess.Popen[bytes]:
        """A process of its own. It must be ended by the test."""
        line = [sys.executable, "-m", "postroom", *words]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(line, cwd=self.folder, env=self.environment(), **{**pipes, **settings})

    def process(self, *words: str, stdin: bytes = b"") -> Answer:
        """Run to the end as a process of its own."""
        line = [sys.executable, "-m", "postroom", *words]
        done = subprocess.run(
            line, cwd=self.folder, env=self.environment(), input=stdin, capture_output=True, timeout=SECONDS
        )
        return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())

    def environment(self) -> dict[str, str]:
        return {**os.environ, "POSTROOM_URL": self.url, "NO_COLOR": "1"}
