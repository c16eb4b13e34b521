"""The job audit: what was planted is found to the offset, and nothing else."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.errors import InvalidSetting, UnknownTopic
from postroom.spark.jobs.audit import AuditOptions, Bad, _checks, audit
from postroom.spark.jobs.fields import Journal, look
from tests.contract.cli_runner import Cli
from tests.integration.spark import planting

KEYS, NUMBERS = 6, 40


def message(key: int, number: int) -> postroom.Message:
    value = json.dumps({"seq": number}).encode()
    return postroom.Message(value, key=f"k{key}", headers={"seq": str(number)}, id=f"k{key}-{number}")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_was_planted_is_found(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    """In a topic that is split in the middle: a key's order goes on from one partition to the next."""
    mq.create_topic("orders", partitions=2)
    mq.create_topic("done", partitions=1)
    sent = [(key, number) for number in range(NUMBERS) for key in range(KEYS)]
    stored = [one for one in sent if one not in {(1, 10), (1, 11), (3, 25)}]
    stored.insert(stored.index((2, 6)), (2, 5))  # a second time
    at = stored.index((4, 7)), stored.index((4, 8))
    stored[at[0]], stored[at[1]] = (4, 8), (4, 7)
    receipts = mq.send_many("orders", [message(*one) for one in stored[:100]])
    mq.split("orders", 0)
    mq.split("orders", 1)
    receipts += mq.send_many("orders", [message(*one) for one in stored[100:]])
    handled = [one for one in dict.fromkeys(stored) if one != (0, 3)] + [(5, 9)]
    at = handled.index((0, 20)), handled.index((0, 21))
    handled[at[0]], handled[at[1]] = (0, 21), (0, 20)
    mq.send_many("done", [postroom.Message(id) for id in [b"k%d-%d" % one for one in handled] + [b"ghost"]])
    journal = tmp_path / "sent.jsonl"
    journal.write_text("".join(f'{{"id": "k{k}-{n}", "at": {i}}}\n' for i, (k, n) in enumerate(sent)))
    places = {one: (r.partition, r.offset) for one, r in zip(stored, receipts, strict=True)}

    said: list[str] = []
    found = audit(
        spark,
        AuditOptions(
            queue={"url": url},
            topic="orders",
            number="header:seq",
            sent=Journal(str(journal), at="at"),
            handled=(Journal("topic:done", id="value"),),
            report=str(tmp_path / "report.jsonl"),
        ),
        progress=said.append,
    )

    assert (found.verdict, found.messages, found.unchecked) == ("not clean", len(stored), ())
    assert dict(found.counts) == {
        "stored": len(stored), "numbered": len(stored), "unnumbered": 0,
        "without_id": 0, "sent": len(sent), "handled": len(handled) + 1,
    }  # fmt: skip
    stored_bad = {("stored", "lost", 3), ("stored", "repeated", 1), ("stored", "out of order", 1)}
    handled_bad = {("handled", kind, 1) for kind in ("lost", "repeated", "out of order", "unknown")}
    assert {(b.stage, b.kind, b.messages) for b in found.bad if b.by == "number"} == stored_bad
    assert {(b.stage, b.kind, b.messages) for b in found.bad if b.by == "id"} == stored_bad | handled_bad
    assert len(found.bad) == 10
    assert (found.count("stored", "lost"), found.count("handled", "lost")) == (3, 1)

    def placed(key: int, number: int) -> dict[str, Any]:
        partition, offset = places[key, number]
        return {"key": f"k{key}", "partition": partition, "offset": offset}

    assert lines(tmp_path / "report.jsonl") == [
        {"stage": "stored", "kind": "lost", "key": "k1", "number": 10, "last_number": 11},
        {"stage": "stored", "kind": "lost", "key": "k3", "number": 25, "last_number": 25},
        {"stage": "stored", "kind": "out of order", "number": 7, **placed(4, 7)},
        {"stage": "stored", "kind": "repeated", "number": 5, **placed(2, 5)},
        {"stage": "handled", "kind": "lost", "id": "k0-3", **placed(0, 3)},
        {"stage": "handled", "kind": "out of order", "id": "k0-20", **placed(0, 20)},
        {"stage": "handled", "kind": "repeated", "id": "k5-9", **placed(5, 9)},
        {"stage": "handled", "kind": "unknown", "id": "ghost"},
        {"stage": "stored", "kind": "lost", "id": "k1-10"},
        {"stage": "stored", "kind": "lost", "id": "k1-11"},
        {"stage": "stored", "kind": "lost", "id": "k3-25"},
        {"stage": "stored", "kind": "out of order", "id": "k4-7", **placed(4, 7)},
        {"stage": "stored", "kind": "repeated", "id": "k2-5", **placed(2, 5)},
    ]
    assert said[0] == "counting what is stored" and said[-1] == "listing what is wrong with ids"


def test_planted_by_chance(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    """All that was planted, and nothing else; `python -m bench audit` does it with two million messages."""
    seed = time.time_ns()
    planted = planting.plant(90, 30, each=8, seed=seed)
    mq.create_topic("orders", partitions=3)
    stored = planting.fill(mq, "orders", planted, tmp_path)
    found = audit(spark, planting.options(url, "orders", tmp_path))
    assert (found.messages, found.unchecked) == (stored, ())
    assert (seed, planting.reported(tmp_path)) == (seed, planted.found())
    assert found.count("stored", "lost") == len(planted.lost)


def test_no_check_takes_the_square(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    """Spark computes a window's frame anew for each row, unless it begins where the window does."""
    mq.create_topic("orders", partitions=2)
    planted = planting.plant(6, 10, each=1, seed=1)
    planting.fill(mq, "orders", planted, tmp_path)
    given = planting.options(url, "orders", tmp_path)
    checks, _ = _checks(spark, given, look(given.queue, "orders"))
    plans = [check.rows._jdf.queryExecution().optimizedPlan().toString().lower() for check in checks]
    frames = [frame for plan in plans for frame in re.findall(r"windowframe\(\w+, (\w+)", plan)]
    assert len(plans) == 2 and set(frames) == {"unboundedpreceding"}


def test_a_clean_topic(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    """A key that is no text, a message without one, JSON numbers, an old report, a journal without order."""
    mq.create_topic("orders", partitions=2)
    all_of_them = [message(key, number) for number in range(5) for key in range(KEYS)]
    mq.send_many("orders", all_of_them)
    mq.send("orders", b'{"seq": 1}', key=b"\xff")
    mq.send("orders", b"{}")
    ids = tmp_path / "handled.txt"
    places = [f"{m.partition}:{m.offset}" for m in mq.read("orders", end="latest")]
    ids.write_text("".join(f"{place}\n" for place in places[:-1]))
    report = tmp_path / "report.jsonl"
    report.write_text("of yesterday")
    found = audit(
        spark,
        AuditOptions(
            {"url": url}, "orders", number="json:seq", id="place", handled=(Journal(str(ids)),),
            waiting_after_ms=0, report=str(report),
        ),
    )  # fmt: skip
    assert (found.clean, found.verdict, found.level, found.waiting) == (True, "clean", 2, 1)
    assert found.counts["unnumbered"] == 1
    assert found.unchecked == (
        "nothing was compared with what was sent: there is no journal of that",
        "the order of handling is not known: the journal names no column for it",
        "1 stored messages have no number in json:seq",
    )
    assert found.report is None and not report.exists()
    later = audit(spark, AuditOptions({"url": url}, "orders", number="json:seq", first_number=-1))
    assert (later.level, later.bad) == (1, (Bad("stored", "lost", "number", KEYS + 2),))


def test_offsets_that_are_gone(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=1)
    for n in range(6):
        mq.send_many("orders", [postroom.Message(b"%d" % n, key="k") for _ in range(10)])
    mq.close()
    database = sqlite3.connect(url.removeprefix("sqlite:///"))
    name = database.execute("select name from sqlite_master where name like 'postroom_log_%'").fetchone()[0]
    assert database.execute(f"delete from {name} where base_offset = 20").rowcount == 1
    database.commit()
    database.close()
    report = tmp_path / "report.jsonl"
    found = audit(spark, AuditOptions({"url": url}, "orders", report=str(report)))
    assert (found.bad, found.report) == ((Bad("stored", "gap", "offset", 10),), str(report))
    gap = {"stage": "stored", "kind": "gap", "partition": 0, "offset": 20, "last_offset": 29}
    assert lines(report) == [gap]
    assert found.unchecked[0].startswith("only offsets were looked at: name a running number, or journals")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"number": "seq"}, "number='seq': choose key, value, id, place, header:NAME or"),
        ({"number": "key"}, "number='key': choose header:NAME or json:FIELD"),
        ({"waiting_after_ms": 1}, "goes with a journal of what was handled"),
        ({"start_ms": 2, "end_ms": 1}, "the range is empty"),
        ({"number": "header:no"}, "none of 1 stored messages has one there"),
        ({"sent": Journal("/no/where.csv")}, "there is no journal /no/where.csv: name a file, or topic:NAME"),
        ({"sent": Journal("ids.doc")}, "of no kind that is known: .parquet, .csv"),
        ({"report": "/no/where.jsonl"}, "there is no folder /no"),
    ],
)
def test_refused(spark: Any, url: str, mq: Any, options: dict[str, Any], text: str) -> None:
    mq.create_topic("orders", partitions=1)
    mq.send("orders", b"x", key="k")
    with pytest.raises(InvalidSetting, match=text):
        audit(spark, AuditOptions({"url": url}, "orders", **options))


def test_what_is_not_there(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    with pytest.raises(UnknownTopic, match="no topic 'orders'"):
        audit(spark, AuditOptions({"url": url}, "orders"))
    mq.create_topic("orders", partitions=1)
    assert audit(spark, AuditOptions({"url": url}, "orders")).partitions == ()
    journal = tmp_path / "sent.csv"
    journal.write_text("number,when\n1,2\n")
    with pytest.raises(InvalidSetting, match="has no column 'id'; it has number, when"):
        audit(spark, AuditOptions({"url": url}, "orders", sent=Journal(str(journal))))


@pytest.mark.usefixtures("spark")
def test_on_the_command_line(url: str, mq: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli = Cli(tmp_path, url)
    mq.create_topic("orders", partitions=1)
    mq.send_many("orders", [message(0, number) for number in (0, 1, 3)])
    shown = cli("pipeline", "audit", "orders", "--number", "header:seq")
    assert shown.code == 3
    assert "verdict: not clean; each message that is bad is in audit-orders.jsonl" in shown.out
    assert lines(tmp_path / "audit-orders.jsonl")[0]["last_number"] == 2
    mq.send_many("orders", [message(0, 2)])
    Path("sent.csv").write_text("id\nk0-0\nk0-1\nk0-3\nk0-2\n")
    clean = cli.ok("pipeline", "audit", "orders", "--sent", "sent.csv", "--json").json
    assert (clean["verdict"], clean["counts"]["sent"], clean["bad"], clean["report"]) == (
        "clean",
        4,
        [],
        None,
    )
    assert not Path("audit-orders.jsonl").exists()
    assert cli("pipeline", "audit", "orders", "--since", "today").code == 2
    assert "did you mean orders" in cli("pipeline", "audit", "order").err
