"""Fetches outsiders' clients and suites, runs them against our listener, and prints one table.

    python -m tests.kafka_clients [--store sqlite] [--only '00*'] [kcat kgo …]

The first run fetches and builds for some minutes, into ~/.cache/postroom-kafka-clients. Fails only on
surprises: known failures are in `expected.toml`, with a sentence each. Not a part of `make test`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from .fetch import Missing
from .outcome import SKIPPED, Case, Judged, judged, known_failures, table
from .running import STORES, Listener, listener
from .suites.java_trouble import java_trouble
from .suites.outsiders import kafka_python, kgo, librdkafka, librdkafka_share
from .suites.share import kafka_share
from .suites.spark_source import spark
from .suites.tools import kafka_tools, kcat

SUITES: dict[str, Callable[[Listener], Iterator[Case]]] = {
    "kcat": kcat,
    "kafka-python": kafka_python,
    "kafka-share": kafka_share,
    "kafka-tools": kafka_tools,
    "kgo": kgo,
    "librdkafka": librdkafka,
    "librdkafka-share": librdkafka_share,
    "java-trouble": java_trouble,
    "spark": spark,
}
EXPECTED = Path(__file__).with_name("expected.toml")


def tried(suite: str, store: str, known: dict[str, str], only: str) -> Judged:
    """A suite on a store of its own; where it cannot be had, it is skipped with the reason."""
    cases: list[Case] = []
    try:
        with listener(store, sharded=suite == "spark") as found:
            for case in SUITES[suite](replace(found, only=only)):
                cases.append(case)
                print(
                    f"{suite} on {store}: {case.name}: {case.verdict} {case.reason}",
                    file=sys.stderr,
                    flush=True,
                )
    except Missing as error:
        cases.append(Case("all of it", SKIPPED, str(error)))
    return judged(suite, store, cases, known)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kafka_clients", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; default: all")
    parser.add_argument("--store", action="append", choices=STORES, help="may be repeated; default: both")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="these cases of kgo and librdkafka")
    wish = parser.parse_args()
    unknown = set(wish.suites) - set(SUITES)
    if unknown:
        parser.error(f"no suite is called {', '.join(sorted(unknown))}; choose of {', '.join(SUITES)}")
    known = known_failures(EXPECTED)
    results = [
        tried(suite, store, known.get(suite, {}), wish.only)
        for suite in wish.suites or SUITES
        for store in wish.store or STORES
    ]
    print(table(results))
    return int(any(one.surprises for one in results))


if __name__ == "__main__":
    sys.exit(main())
