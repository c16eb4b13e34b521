"""The job triage in real Spark, and the list it makes, through `postroom dead redrive --from`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.cli.root import run
from postroom.errors import InvalidSetting
from postroom.spark.jobs.triage import NO_REASON, TriageOptions, plain_reason, triage

REASONS = {
    "no customer 4711": "no customer <n>",
    "no customer 4712": "no customer <n>",
    "Bad: order o-42 of 2026-01-31T08:00:00Z costs 1,200.50": "Bad: order o-<n> of <time> costs <n>",
    "550e8400-e29b-41d4-a716-446655440000 is unknown": "<id> is unknown",
    "at 0x7f3a, etag 9f86d081, job 01HZX3KQVB8E9TDJX0Q1": "at <id>, etag <id>, job <id>",
    "timed out after 30s": "timed out after <n>s",
    "ann.b+c@mail.example.org bounced\nTraceback …": "<email> bounced",
    "E1001: utf8 in S3": "E1001: utf8 in S3",
    "KeyError: 'price'": "KeyError: 'price'",
    "  two\t words ": "two words",
    "": NO_REASON,
}


def test_by_error(spark: Any, url: str, mq: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mq.create_topic("orders", partitions=1)
    reasons = [*REASONS, *(f"no customer {n}" for n in range(20))]
    sent = [postroom.Message(b"v%d " % n + b"x" * 300, key=f"k{n % 3}", id=f"o-{n}", headers={"h": "x"})
            for n in range(len(reasons))]  # fmt: skip
    mq.send_many("orders", sent)
    with mq.consumer("orders", group="billing") as consumer:
        for message, reason in zip(consumer.poll(max_messages=100, wait=20), reasons, strict=True):
            message.dead(reason)
    file = tmp_path / "list.jsonl"
    done = triage(spark, TriageOptions({"url": url}, "orders", "billing", samples=2, redrive_list=str(file)))
    assert done.letters == len(reasons) and not done.more
    assert {error.error for error in done.errors} == set(REASONS.values())
    most = done.errors[0]
    assert (most.error, most.letters, most.keys, most.attempts) == ("no customer <n>", 22, 3, 1)
    assert 0 < most.first_ms <= most.last_ms and len(most.samples) == 2
    sample = most.samples[0]
    assert (sample.id, sample.key, sample.offset) == ("o-30", b"k0", 30)
    assert (
        sample.value == b"v30 " + b"x" * 196
        and sample.headers == {"h": b"x"}
        and sample.reason == "no customer 19"
    )

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"o-{n}" for n in range(len(reasons))]
    assert lines[0] == {"topic": "orders", "group": "billing", "id": "o-0", "partition": 0, "offset": 0,
                        "error": "no customer <n>"}  # fmt: skip
    with pytest.raises(InvalidSetting, match="is there already"):
        triage(spark, TriageOptions({"url": url}, "orders", "billing", redrive_list=str(file)))
    capsys.readouterr()
    called = ["pipeline", "triage", "orders", "billing", "--error", "CUSTOMER", "--limit", "5", "--url", url]
    assert run(called) == 0
    said = capsys.readouterr().out
    assert "no customer <n>        2     2         1  20" in said and "there are more than --limit" in said
    assert "no customer <n>  o-0  0:0    k0   h=x      v0 xxx" in said and "KeyError" not in said

    chosen = tmp_path / "customers.jsonl"
    chosen.write_text("\n".join(line for line in file.read_text().splitlines() if "no customer" in line))
    assert run(["dead", "redrive", "orders", "billing", "--from", str(chosen), "--url", url]) == 0
    assert "handed 22 dead letters back to group billing" in capsys.readouterr().out
    assert len(mq.dead_letters("orders", "billing")) == len(reasons) - 22
    assert run(["dead", "redrive", "orders", "billing", "--from", str(chosen), "--url", url]) == 0
    said = capsys.readouterr()
    assert (
        "handed 0 dead letters" in said.out
        and "22 dead letters of the list are not there any more" in said.err
    )
    assert run(["dead", "redrive", "orders", "others", "--from", str(chosen), "--url", url]) == 2
    assert "line 1: this is a dead letter of group 'billing' of topic 'orders'" in capsys.readouterr().err
    chosen.write_text("o-1\n")
    assert run(["dead", "redrive", "orders", "billing", "--from", str(chosen), "--url", url]) == 2
    assert "line 1: write an object such as" in capsys.readouterr().err


def test_none(url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=1)
    mq.create_group("orders", "billing")
    none = triage(None, TriageOptions({"url": url}, "orders", "billing", redrive_list=str(tmp_path / "list")))
    assert none.letters == 0 and none.errors == () and not (tmp_path / "list").exists()
    with pytest.raises(postroom.UnknownGroup):
        triage(None, TriageOptions({"url": url}, "orders", "others"))
    assert "regexp_replace" in plain_reason("reason")
