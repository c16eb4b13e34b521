"""Command-line tools: kcat with its old librdkafka, and Kafka's own, in Java.

Scenarios of ours, since tools have no tests: each case is one command whose words are known beforehand.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

from .. import fetch
from ..outcome import FAILED, PASSED, Case
from ..running import Listener, Ran, run

__all__ = ["kafka_tools", "kcat"]

_LINES = [f"line {number}" for number in range(1000)]
_GIVEN = "\n".join(_LINES).encode() + b"\n"


def _case(name: str, ran: Ran, right: Callable[[str], bool] = lambda said: True) -> Case:
    if ran.code:
        return Case(name, FAILED, f"exit code {ran.code}: {ran.last_line}")
    return Case(name, PASSED) if right(ran.said) else Case(name, FAILED, f"said: {ran.last_line}")


# ---- kcat ----


def kcat(listener: Listener) -> Iterator[Case]:
    place = fetch.kcat()
    libraries = ":".join(sorted({str(path.parent) for path in place.rglob("*.so*")}))

    def do(*arguments: str, given: bytes = b"") -> Ran:
        command = [place / "usr" / "bin" / "kcat", "-b", listener.address, *arguments]
        return run(command, 60, env={"LD_LIBRARY_PATH": libraries}, given=given)

    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        topic = f"kcat-{codec}"
        yield _case(f"produce {codec}", do("-P", "-t", topic, "-p", "0", "-z", codec, given=_GIVEN))
        ran = do("-C", "-q", "-t", topic, "-p", "0", "-o", "beginning", "-e")
        yield _case(f"consume {codec}", ran, lambda said: said.splitlines() == _LINES)
    yield _case("list", do("-L"), lambda said: 'topic "kcat-gzip" with 4 partitions' in said)
    yield _case("offsets by time", do("-Q", "-t", "kcat-gzip:0:-1"), lambda said: "offset 1000" in said)
    ran = do("-C", "-q", "-t", "kcat-gzip", "-p", "0", "-o", "-10", "-e", "-f", "%o %s\n")
    yield _case("consume the tail", ran, lambda said: said.splitlines()[:1] == ["990 line 990"])
    ran = do("-P", "-t", "kcat-keys", "-p", "1", "-K:", "-H", "source=web", given=b"key:value\n")
    yield _case("produce a key and a header", ran)
    ran = do("-C", "-q", "-t", "kcat-keys", "-p", "1", "-o", "0", "-e", "-f", "%k %s %h\n")
    yield _case("consume a key and a header", ran, lambda said: said.strip() == "key value source=web")
    ran = do("-P", "-t", "kcat-idempotent", "-X", "enable.idempotence=true", given=_GIVEN)
    yield _case("produce, idempotent", ran)
    ran = do("-G", "kcat-group", "-q", "-e", "-X", "auto.offset.reset=earliest", "kcat-gzip")
    yield _case("consume as a group", ran, lambda said: said.splitlines() == _LINES)


# ---- Kafka's own ----

_PACKAGE = "org.apache.kafka.tools"


def kafka_tools(listener: Listener) -> Iterator[Case]:
    jars = fetch.kafka_tools()
    java = shutil.which("java")
    if java is None:
        raise fetch.Missing("needs java: install one of 17 or newer")
    program: str = java
    server = ["--bootstrap-server", listener.address]

    def do(tool: str, *arguments: str, given: bytes = b"", limit_s: float = 120) -> Ran:
        return run([program, "-cp", f"{jars}/*", f"{_PACKAGE}.{tool}", *arguments], limit_s, given=given)

    yield _case(
        "versions", do("BrokerApiVersionsCommand", *server), lambda said: "Produce(0): 0 to 12" in said
    )
    topic = ["--topic", "tools"]
    made = do("TopicCommand", *server, "--create", *topic, "--partitions", "2", "--replication-factor", "1")
    yield _case("topics: create", made)
    ran = do("TopicCommand", *server, "--describe", *topic)
    yield _case("topics: describe", ran, lambda said: "PartitionCount: 2" in said)
    yield _case("console producer", do("ConsoleProducer", *server, *topic, given=_GIVEN))
    reading = [*topic, "--from-beginning", "--max-messages", "1000", "--timeout-ms", "30000"]
    ran = do("consumer.ConsoleConsumer", *server, *reading)
    yield _case("console consumer, as a group", ran, lambda said: "Processed a total of 1000" in said)
    yield from _by_partition(do, server)
    yield from _verifiable_and_perf(do, server)
    yield _case("topics: delete", do("TopicCommand", *server, "--delete", *topic))


def _by_partition(do: Callable[..., Ran], server: list[str]) -> Iterator[Case]:
    ran = do("GetOffsetShell", *server, "--topic", "tools")
    ends = [int(line.rpartition(":")[2]) for line in ran.said.splitlines() if line.startswith("tools:")]
    yield _case("offsets", ran, lambda said: sum(ends) == len(_LINES))
    fullest = ends.index(max(ends)) if ends else 0
    reading = ["--topic", "tools", "--partition", str(fullest), "--offset", "earliest"]
    limits = ["--max-messages", str(max(ends, default=1)), "--timeout-ms", "30000"]
    ran = do("consumer.ConsoleConsumer", *server, *reading, *limits)
    yield _case(
        "console consumer, by partition", ran, lambda said: f"total of {max(ends, default=1)}" in said
    )


def _verifiable_and_perf(do: Callable[..., Ran], server: list[str]) -> Iterator[Case]:
    topic = ["--topic", "tools-verified"]
    ran = do("VerifiableProducer", *server, *topic, "--max-messages", "2000", "--acks", "-1")
    yield _case("verifiable producer", ran, lambda said: '"acked":2000' in said)
    members = ["--group-id", "verified", "--max-messages", "2000", "--reset-policy", "earliest"]
    ran = do("VerifiableConsumer", *server, *topic, *members, limit_s=60)
    yield _case("verifiable consumer", ran, lambda said: "records_consumed" in said)
    sizes = ["--num-records", "50000", "--record-size", "100", "--throughput", "-1"]
    ran = do("ProducerPerformance", *server, "--topic", "tools-perf", *sizes)
    yield _case("producer performance", ran, lambda said: "50000 records sent" in said)
    many = ["--num-records", "50000", "--timeout", "20000"]
    ran = do("ConsumerPerformance", *server, "--topic", "tools-perf", *many, limit_s=60)
    yield _case("consumer performance", ran, lambda said: "WARNING: Exiting before" not in said)
