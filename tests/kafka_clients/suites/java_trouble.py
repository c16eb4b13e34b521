"""Java's verifiable producer and consumers, while a broker and a consumer are killed.

They say in lines of JSON what was confirmed, consumed and committed, and are judged by that alone: nothing
confirmed is lost, a partition is consumed in order, and no committed offset goes back.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from postroom.testing import check
from postroom.testing.check import Event
from tests.servers.places import HOST, free_port

from .. import fetch
from ..outcome import FAILED, PASSED, Case
from ..running import Listener, beside

__all__ = ["java_trouble", "judged_trouble"]

_MESSAGES, _A_SECOND = 6_000, 300
_PATIENCE_S = 300
_TOPIC, _GROUP = "troubled", "troubled-group"
_MILLION = 1_000_000  # nanoseconds in a millisecond


class _Tool:
    """A tool that runs until it is killed, and what it has said so far."""

    def __init__(self, name: str, command: list[str], folder: Path, stack: ExitStack) -> None:
        self.name, self._path = name, folder / f"{name}.jsonl"
        with self._path.open("wb") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        stack.callback(self.end)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def said(self, *names: str) -> list[dict[str, Any]]:
        lines = self._path.read_bytes().split(b"\n")[:-1]
        found = (json.loads(line) for line in lines if line.startswith(b"{"))
        return [one for one in found if one.get("name") in names]


def java_trouble(listener: Listener) -> Iterator[Case]:
    jars, java = fetch.kafka_tools(), shutil.which("java")
    if java is None:
        raise fetch.Missing("needs java: install one of 17 or newer")
    port = free_port()
    both = ["--bootstrap-server", f"{listener.address},{HOST}:{port}", "--topic", _TOPIC]
    start = [java, "-Xmx256m", "-cp", f"{jars}/*"]
    package = "org.apache.kafka.tools"
    producing = ["--max-messages", str(_MESSAGES), "--throughput", str(_A_SECOND), "--acks", "-1"]
    consuming = ["--group-id", _GROUP, "--verbose", "--reset-policy", "earliest", "--session-timeout", "6000"]
    with ExitStack() as stack:
        second = stack.enter_context(beside(listener, port))

        def consumer(name: str) -> _Tool:
            command = [*start, f"{package}.VerifiableConsumer", *both, *consuming]
            return _Tool(name, command, listener.folder, stack)

        consumers = [consumer("c0"), consumer("c1")]
        producer = _Tool(
            "producer", [*start, f"{package}.VerifiableProducer", *both, *producing], listener.folder, stack
        )

        def confirmed() -> int:
            return len(producer.said("producer_send_success"))

        def consumed() -> int:
            return len({one["value"] for tool in consumers for one in tool.said("record_data")})

        killed: list[Event] = []
        reached = _until(lambda: consumed() > 300)
        second.kill()
        reached = reached and _until(lambda: consumed() > 1200)
        stack.enter_context(beside(listener, port))
        consumers[0].end()
        killed.append(Event(time.time_ns(), "killed", "c0"))
        consumers.append(consumer("c2"))
        reached = reached and _until(lambda: producer.process.poll() is not None)
        reached = reached and _until(lambda: consumed() >= confirmed())
        yield Case("everybody goes on", PASSED if reached else FAILED, f"{consumed()} of {confirmed()}")
        yield from judged_trouble(producer.said("producer_send_success"), _noted(consumers) + killed)


def _until(condition: Callable[[], bool]) -> bool:
    give_up_at = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.2)
    return True


def _noted(consumers: list[_Tool]) -> list[Event]:
    found = []
    for tool in consumers:
        for one in tool.said("record_data", "offsets_committed"):
            at = one["timestamp"] * _MILLION
            if one["name"] == "record_data":
                found.append(_event(at, "handled", tool.name, one, one["value"]))
            elif one["success"]:
                found += [_event(at, "committed", tool.name, part) for part in one["offsets"]]
    return found


def _event(at: int, did: check.Did, by: str, one: dict[str, Any], id: str = "") -> Event:
    number = one["partition"]
    return Event(at, did, by, id, str(number) if id else "", _TOPIC, _GROUP, number, one["offset"])


def judged_trouble(sent: list[dict[str, Any]], noted: list[Event]) -> Iterator[Case]:
    """The producer counts its messages, so that their numbers are the order in which they were sent."""
    began = min((one["timestamp"] for one in sent), default=0) * _MILLION - 2 * _MESSAGES
    history = [*noted]
    for one in sent:
        key, id = str(one["partition"]), one["value"]
        history.append(Event(began + int(id), "sending", "p", id, key, _TOPIC))
        history.append(Event(one["timestamp"] * _MILLION, "confirmed", "p", id, key, _TOPIC))
    verdict = check.group(history, _GROUP, topic=_TOPIC, ordered=True)
    for what, kind in (
        ("nothing confirmed is lost", "lost"),
        ("partitions stay in order", "out of order"),
        ("no committed offset goes back", "went back"),
    ):
        wrong = [fault for fault in verdict.faults if fault.kind == kind]
        enough = verdict.confirmed == _MESSAGES
        yield Case(what, FAILED if wrong or not enough else PASSED, str(wrong[:2]) if wrong else str(verdict))
