"""Kafka's own share consumer, in Java: scenarios of ours, and its command-line tools for share groups.

Kafka's integration tests of share groups start brokers of their own and look into them, so they cannot be run
against another: these cases take their place.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import fetch
from ..outcome import FAILED, PASSED, Case
from ..running import Listener, Ran, run

__all__ = ["java_cases", "kafka_share"]

_PROGRAM = Path(__file__).parents[1] / "ShareConsumers.java"
_LIMIT_S = 600
_CASE = re.compile(r"^(PASS|FAIL) (\S+) ?(.*)$", re.MULTILINE)
_MESSAGES = 100


def kafka_share(listener: Listener) -> Iterator[Case]:
    jars, java = fetch.kafka_tools(), shutil.which("java")
    if java is None:
        raise fetch.Missing("needs java: install one of 17 or newer")
    program, server = java, ["--bootstrap-server", listener.address]
    yield from java_cases(run([program, "-cp", f"{jars}/*", _PROGRAM, listener.address], _LIMIT_S))

    def tool(name: str, *arguments: str, given: bytes = b"") -> Ran:
        command = [program, "-cp", f"{jars}/*", f"org.apache.kafka.tools.{name}", *server, *arguments]
        return run(command, 120, given=given)

    lines = [f"line {number}" for number in range(_MESSAGES)]
    tool("ConsoleProducer", "--topic", "share-tools", given="\n".join(lines).encode() + b"\n")
    made = ["group", "create", "share-tools", "tools", "--start", "earliest", "--url", listener.url]
    run([sys.executable, "-m", "postroom", *made], 60)
    wanted = ["--topic", "share-tools", "--group", "tools", "--max-messages", str(_MESSAGES)]
    ran = tool("consumer.ConsoleShareConsumer", *wanted, "--timeout-ms", "30000")
    read = set(lines) <= set(ran.said.splitlines())
    yield Case("console share consumer", PASSED if read else FAILED, "" if read else ran.last_line)
    ran = tool("consumer.group.ShareGroupCommand", "--describe", "--group", "tools", "--offsets")
    told = not ran.code and "share-tools" in ran.said
    yield Case("share groups: describe", PASSED if told else FAILED, "" if told else ran.last_line)


def java_cases(ran: Ran) -> list[Case]:
    """What the program said of each case. One that ended before it said anything has failed."""
    found = [
        Case(name, PASSED if word == "PASS" else FAILED, reason)
        for word, name, reason in _CASE.findall(ran.said)
    ]
    if ran.code or not found:
        found.append(Case("the whole run", FAILED, f"ended with {ran.code}: {ran.last_line}"))
    return found
