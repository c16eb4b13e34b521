"""The page of settings: environment variables, and what topics, groups and brokers are set to, from the code.

    python -m tools.docs.settings           # write docs/settings.md
    python -m tools.docs.settings --check   # exit code 1 if it is out of date

Decides how a default is shown. What a broker's setting means stands with it in `serve_settings`; what the
others mean is said here, and a setting without a sentence is an error. Must never miss one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.serve_settings import ServeSettings, key_of
from postroom.units import format_bytes, format_duration

__all__ = ["PAGE", "text"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

ENVIRONMENT = {
    "POSTROOM_URL": "Where the queue is: for every command, for `App()` without an address, and in place of "
    "the app's own in `postroom worker`. `--url` wins over it.",
    "POSTROOM_SHARDS": "Further databases of the queue, as `b=mysql://…,c=…`. `--shard` wins over it.",
    "POSTROOM_TOKEN": "The token for brokers, unless `token=` is given.",
    "POSTROOM_TLS": "`1`, or a PEM file with the authorities to trust, unless `tls=` is given.",
    "POSTROOM_CONFIG": "The TOML file of `postroom serve`, unless `--config` is given.",
    "POSTROOM_SERVE_…": "Any setting of a broker (below), in capitals: `POSTROOM_SERVE_HTTP_PORT=7071`.",
}

TOPIC = {
    "storage": "`durable` or [`volatile`](howto/volatile.md); for ever",
    "retention": "[kept](howto/retention.md) for so long; 0: no limit by age",
    "retention_bytes": "kept in each partition; 0: no limit by size",
    "keep": "`needed`: never dropped while a group needs it; `limits`: the limits win",
    "drop_settled": "drop early what every group has settled",
    "dedup_window": "[ids](howto/deduplication.md) are remembered for so long; 0: not at all",
    "max_backlog": "[messages](howto/limits-and-expiry.md) that the slowest group may be behind; 0: no limit",
    "max_backlog_bytes": "the same in bytes",
    "kafka_partitions": "made for [Kafka clients](howto/kafka.md), who see so many partitions; 0: it was not",
    "keys": "of topics for Kafka clients: [by whose rule](howto/kafka.md#where-a-key-goes) a key goes",
    "kafka_configs": "what Kafka clients have set of their own configs, such as `max.message.bytes`",
}

GROUP = {
    "mode": "`shared`, [`ordered`](howto/ordered.md) or [`broadcast`](howto/broadcast.md); for ever",
    "order": "ordered groups: by `key`, or by `partition`",
    "start": "a new group [begins](howto/reading-and-replay.md) at `earliest`, `latest`, a moment or offsets",
    "lease": "what is handed out belongs to its member for so long; renewed while it lives",
    "max_attempts": "then a [dead letter](howto/retries-and-dead-letters.md)",
    "exhausted": "after the last attempt: `dead`, or `stop` (ordered groups): the key waits for people",
    "max_hold": "ordered groups: a failing message holds its key no longer",
    "expires": "forgotten when unused for so long; 0: never",
    "slow_lane": "shared groups: [sources](howto/slow-lanes.md) that fail or take long are diverted",
}
_OPENING = (
    "# Settings",
    "",
    "All of them on one page, made from the code by `make settings`. Durations are seconds, `timedelta` or",
    "`10m`; sizes are bytes or `64 MB`. Limits that are no settings are among the",
    "[limits and defaults](operations.md#limits-and-defaults).",
    "",
    "## Environment variables",
)
_TOPICS = (
    "",
    "Django and Flask read `POSTROOM_URL` and `POSTROOM_OPTIONS` of their own settings: see",
    "[web frameworks](howto/integrations.md).",
    "",
    "## A topic",
    "Of `mq.create_topic`, `mq.alter_topic`, `postroom topic create` and `postroom topic alter`. A topic has",
    "4 `partitions` if nothing is said.",
    "",
)
_GROUPS = (
    "",
    "## A group",
    "Of `mq.create_group`, `mq.consumer`, `app.subscribe`, `mq.alter_group`, `postroom group create` and",
    "`postroom group alter`.",
    "",
)
_BROKERS = (
    "",
    "## A broker",
    "Of `postroom serve`, in this order: an option (`--http-port`), the environment",
    "(`POSTROOM_SERVE_HTTP_PORT`), the file (`http_port`), the default. See",
    "[serving](howto/serving.md).",
    "",
)
_NAMES = {"dedup_ms": "dedup_window"}  # where the stored name and the written one differ


def text() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    three = ("setting", "default", "what it is")
    variables = ((f"`{name}`", said) for name, said in ENVIRONMENT.items())
    yield from _OPENING
    yield from _table(("variable", "what it is"), variables)
    yield from _TOPICS
    yield from _table(three, _policy(TopicSettings, TOPIC))
    yield from _GROUPS
    yield from _table(three, _policy(GroupSettings, GROUP))
    yield from _BROKERS
    yield from _table(three, _broker())


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _policy(settings: type, said: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    written = [_NAMES.get(one.name, _written(one.name)) for one in fields(settings)]
    assert written == list(said), f"say what these are, in this order: {written}"
    for one, name in zip(fields(settings), written, strict=True):
        yield f"`{name}`", _default(one.name, one.default), said[name]


def _written(name: str) -> str:
    return name.removesuffix("_ms")


def _broker() -> Iterator[tuple[str, ...]]:
    for one in fields(ServeSettings):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        choices = one.metadata.get("choices")
        said = one.metadata["help"] + (f" {', '.join(choices)}." if choices else "")
        yield f"`{key_of(one.name)}`", _default(one.name, default), said


def _default(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        if value and name.endswith("_ms"):
            return format_duration(value)
        return format_bytes(value) if value and name.endswith("_bytes") else str(value)
    if isinstance(value, str):
        return f"`{value}`" if value else "–"
    return "earliest" if name == "start" else "–"


def main() -> int:
    made = text()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
        print("docs/settings.md is out of date: run `make settings`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
