"""`postroom topic …`: create, list, show, alter, delete and purge topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...model.topology.names import check_topic
from ..framework import show
from ..framework.command import Run, command, family
from ..framework.options import Topic, duration, size
from ..framework.show import View, answer
from ..framework.terminal import DryRun, Losses, Yes, agreed

if TYPE_CHECKING:
    from postroom import TopicInfo

__all__ = ["app"]

app = family("topic", "Create, list, change and delete topics.")

Retention = Annotated[
    str | None,
    typer.Option(help='How long messages are kept, such as "7d"; 0: no limit.', show_default=False),
]
RetentionSize = Annotated[
    str | None,
    typer.Option("--retention-bytes", help='Most to keep per partition, such as "1GB"; 0: no limit.'),
]
Keep = Annotated[
    str | None,
    typer.Option(help="needed: never drop what a group still needs; limits: the limits win.", metavar="WHAT"),
]
DropSettled = Annotated[
    bool | None,
    typer.Option("--drop-settled/--keep-settled", help="Drop early what every group has settled."),
]
DedupWindow = Annotated[
    str | None,
    typer.Option(help='Drop a message whose id was sent before, within "10m"; 0: ids are not looked at.'),
]
MaxBacklog = Annotated[
    int | None,
    typer.Option(min=0, help="Refuse sends while the slowest group is so many behind; 0: no limit."),
]
MaxBacklogSize = Annotated[
    str | None, typer.Option("--max-backlog-bytes", help='The same by size, such as "1GB"; 0: no limit.')
]


@command(app, "create")
async def create(
    run: Run,
    topic: Topic,
    partitions: Annotated[int | None, typer.Option("--partitions", "-p", help="How many partitions.")] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="durable: flushed before it is confirmed; volatile: fast, lost with a crash."),
    ] = None,
    retention: Retention = None,
    retention_bytes: RetentionSize = None,
    keep: Keep = None,
    drop_settled: DropSettled = None,
    dedup_window: DedupWindow = None,
    max_backlog: MaxBacklog = None,
    max_backlog_bytes: MaxBacklogSize = None,
    kafka_partitions: Annotated[
        int | None, typer.Option(help="For Kafka clients: so many partitions, which stay for ever.")
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(help="With it, whose rule gives a key its partition: postroom, java or librdkafka."),
    ] = None,
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="Fine if it is there already, with what is asked for.")
    ] = False,
) -> None:
    """Create a topic (and the queue's file, if it is not there)."""
    check_topic(topic)  # before a file is made for it
    kept = _kept_wish(retention, retention_bytes, keep, drop_settled)
    limited = _limits_wish(dedup_window, max_backlog, max_backlog_bytes)
    made = {"partitions": partitions, "storage": storage, "kafka_partitions": kafka_partitions, "keys": keys}
    settings = _asked({**made, **kept, **limited})
    async with run.connect(create=True) as mq:
        info = await mq.create_topic(topic, exist_ok=exist_ok, **settings)
    plural = "" if info.partitions == 1 else "s"
    answer(run, _fields(info), f"topic {info.name} is ready, with {info.partitions} partition{plural}")


@command(app, "list")
async def list_topics(
    run: Run,
    all_topics: Annotated[bool, typer.Option("--all", "-a", help="Also Postroom's own topics.")] = False,
) -> None:
    """List the topics."""
    async with run.connect() as mq:
        found = await mq.topics(internal=all_topics)
    _TOPIC.list(run, found, none="no topics yet: make one with `postroom topic create NAME`")


@command(app, "show")
async def show_topic(run: Run, topic: Topic) -> None:
    """Show a topic: its settings, its partitions, and how far its groups are."""
    async with run.connect() as mq:
        info = await mq.topic(topic)
        lags = [await mq.lag(topic, group) for group in info.groups]
    if run.json:
        behind = {lag.group: lag.total.messages for lag in lags}
        show.json_line({**_fields(info), "behind": behind})
        return
    out = show.console()
    out.print(_TOPIC.detail(info))
    if lags:
        rows = [(g.group, show.count(g.total.messages), show.age(g.total.oldest_age_ms)) for g in lags]
        out.print(show.table(("group", "behind", "oldest"), rows, numbers=("behind", "oldest")))


@command(app, "alter")
async def alter(
    run: Run,
    topic: Topic,
    retention: Retention = None,
    retention_bytes: RetentionSize = None,
    keep: Keep = None,
    drop_settled: DropSettled = None,
    dedup_window: DedupWindow = None,
    max_backlog: MaxBacklog = None,
    max_backlog_bytes: MaxBacklogSize = None,
) -> None:
    """Change a topic's settings; what is not named stays."""
    kept = _kept_wish(retention, retention_bytes, keep, drop_settled)
    settings = _asked({**kept, **_limits_wish(dedup_window, max_backlog, max_backlog_bytes)})
    if not settings:
        raise typer.BadParameter("name at least one setting to change, such as --retention 3d")
    async with run.connect() as mq:
        info = await mq.alter_topic(topic, **settings)
    if run.json:
        show.json_line(_fields(info))
    else:
        show.console().print(_TOPIC.detail(info))


@command(app, "delete")
async def delete(run: Run, topic: Topic, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Delete a topic with its messages, its groups and their dead letters."""
    async with run.connect() as mq:
        info = await mq.topic(topic)
        losses: Losses = {
            "topic": topic, "messages": info.messages, "delayed": info.delayed, "groups": len(info.groups),
        }  # fmt: skip
        counted = f"{_messages(info)} and {_groups(info)} will be lost"
        if not agreed(run, f"delete topic {topic!r}", losses, yes=yes, dry_run=dry_run, counted=counted):
            return
        await mq.delete_topic(topic)
    deleted = f"deleted topic {topic} ({show.messages(info.messages)})"
    answer(run, {"deleted": True, **losses}, deleted)


@command(app, "purge")
async def purge(run: Run, topic: Topic, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Throw away all messages of a topic, delayed ones too; the topic and its groups stay."""
    async with run.connect() as mq:
        info = await mq.topic(topic)
        losses: Losses = {"topic": topic, "messages": info.messages, "delayed": info.delayed}
        counted = f"{_messages(info)} will be lost, for {_groups(info)}"
        if not agreed(run, f"purge topic {topic!r}", losses, yes=yes, dry_run=dry_run, counted=counted):
            return
        gone = await mq.purge(topic)
    fields = {"purged": True, **losses, "messages": gone}
    answer(run, fields, f"purged topic {topic}: {show.messages(gone, 'is', 'are')} gone")


def _kept_wish(
    retention: str | None, retention_bytes: str | None, keep: str | None, drop_settled: bool | None
) -> dict[str, Any]:
    return {
        "retention": duration(retention, name="--retention"),
        "retention_bytes": size(retention_bytes, name="--retention-bytes"),
        "keep": keep,
        "drop_settled": drop_settled,
    }


def _limits_wish(
    dedup_window: str | None, max_backlog: int | None, max_backlog_bytes: str | None
) -> dict[str, Any]:
    return {
        "dedup_window": duration(dedup_window, name="--dedup-window"),
        "max_backlog": max_backlog,
        "max_backlog_bytes": size(max_backlog_bytes, name="--max-backlog-bytes"),
    }


def _asked(settings: dict[str, Any]) -> dict[str, Any]:
    """Return only those that were named: the others are for the SDK to decide."""
    return {name: value for name, value in settings.items() if value is not None}


def _fields(info: TopicInfo) -> dict[str, Any]:
    settings = info.settings
    return {
        "topic": info.name,
        "partitions": info.partitions,
        "messages": info.messages,
        "delayed": info.delayed,
        "groups": list(info.groups),
        "storage": settings.storage,
        "retention_ms": settings.retention_ms,
        "retention_bytes": settings.retention_bytes,
        "keep": settings.keep,
        "drop_settled": settings.drop_settled,
        "dedup_window_ms": settings.dedup_ms,
        "max_backlog": settings.max_backlog,
        "max_backlog_bytes": settings.max_backlog_bytes,
        "kafka_partitions": settings.kafka_partitions,
        "keys": settings.keys,
        "created_at": show.moment(info.created_at),
        "internal": info.internal,
    }


def _lines(info: TopicInfo) -> list[tuple[str, str]]:
    settings = info.settings
    return [
        ("partitions", str(info.partitions)),
        ("messages", show.count(info.messages)),
        ("delayed", show.count(info.delayed)),
        ("storage", settings.storage),
        ("retention", _kept(info)),
        ("keep", settings.keep),
        ("drop settled", "yes" if settings.drop_settled else "no"),
        ("dedup window", show.age(settings.dedup_ms)),
        ("max backlog", _backlog(info)),
        *(
            [("for Kafka clients", f"yes, keys by the rule of {settings.keys}")]
            if settings.kafka_partitions
            else []
        ),
        ("created", show.moment(info.created_at)),
        ("groups", _names(info)),
    ]


def _kept(info: TopicInfo) -> str:
    from ...units import format_bytes, format_duration

    limits = []
    if info.settings.retention_ms:
        limits.append(format_duration(info.settings.retention_ms))
    if info.settings.retention_bytes:
        limits.append(f"{format_bytes(info.settings.retention_bytes)} per partition")
    return ", ".join(limits) or "no limit"


def _backlog(info: TopicInfo) -> str:
    from ...units import format_bytes

    limits = []
    if info.settings.max_backlog:
        limits.append(show.messages(info.settings.max_backlog))
    if info.settings.max_backlog_bytes:
        limits.append(format_bytes(info.settings.max_backlog_bytes))
    return ", ".join(limits) or "no limit"


def _messages(info: TopicInfo) -> str:
    delayed = f", {show.count(info.delayed)} delayed" if info.delayed else ""
    return f"{show.messages(info.messages)}{delayed}"


def _groups(info: TopicInfo) -> str:
    return f"{len(info.groups)} group{'' if len(info.groups) == 1 else 's'}"


def _names(info: TopicInfo) -> str:
    return ", ".join(info.groups) or "–"


_TOPIC: View[TopicInfo] = View(
    fields=_fields,
    columns={
        "topic": lambda info: info.name,
        "partitions": lambda info: str(info.partitions),
        "messages": lambda info: show.count(info.messages),
        "delayed": lambda info: show.count(info.delayed),
        "storage": lambda info: info.settings.storage,
        "retention": _kept,
        "groups": _names,
    },
    numbers=("partitions", "messages", "delayed"),
    title=lambda info: f"topic {info.name}",
    lines=_lines,
)
