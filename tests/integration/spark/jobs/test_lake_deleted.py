"""Rows that Delta has deleted stay deleted: in DataFrames, replay and audit, and when archiving goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from postroom.errors import InvalidSetting
from postroom.spark.jobs.archive import ArchiveOptions, archive
from postroom.spark.jobs.audit import AuditOptions, audit
from postroom.spark.jobs.fields import Journal
from postroom.spark.jobs.lake.delta import DeltaLake
from postroom.spark.jobs.replay import ReplayOptions, replay
from tests.integration.spark.streams import send

MADE = Path(__file__).parent / "deleted_rows"
KEPT = [n for n in range(40) if n not in (5, 7, 25)]
Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """A space and an umlaut are in the address."""
    return shutil.copytree(MADE, tmp_path / "a läke")


def numbers(frame: Any) -> list[int]:
    return sorted(row["offset"] for row in frame.select("offset").collect())


def inlined(log: Path) -> None:
    """The vector of two rows, which is in a file, into the log itself, as the protocol allows."""
    stored = next(log.parent.glob("deletion_vector_*.bin")).read_bytes()
    commit = log / "00000000000000000004.json"
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    for action in actions:
        vector = action.get("add", {}).get("deletionVector", {})
        if vector.get("cardinality") == 2:
            first = vector.pop("offset") + 4  # behind its length
            data = stored[first : first + vector["sizeInBytes"]]
            words = [int.from_bytes(data[at : at + 4]) for at in range(0, len(data), 4)]
            text = "".join(Z85[word // 85**place % 85] for word in words for place in (4, 3, 2, 1, 0))
            vector.update(storageType="i", pathOrInlineDv=text)
    commit.write_text("\n".join(json.dumps(action) for action in actions))


def test_deleted_rows_stay_deleted(spark: Any, url: str, mq: Any, lake: Path) -> None:
    table = DeltaLake(str(lake), "orders")
    rows = table.frame(spark).collect()
    assert sorted(row["offset"] for row in rows) == KEPT
    assert {(str(r["date"]), r["value"]) for r in rows if r["offset"] in (6, 15)} == {
        ("2026-01-01", b"6"),
        ("2026-01-02", b"15"),
    }
    inlined(lake / "orders" / "_delta_log")
    assert numbers(table.frame(spark, "2026-01-01", "2026-01-01")) == [n for n in KEPT if n // 10 in (0, 2)]

    mq.create_topic("again", partitions=1)
    wanted = ReplayOptions({"url": url}, "orders", "again", "a", folder=str(lake))
    assert replay(spark, wanted).messages == len(KEPT)
    assert sorted(int(message.value) for message in mq.read("again")) == KEPT
    sent = Journal(str(lake / "orders"), id="value")
    found = audit(spark, AuditOptions({"url": url}, "again", id="value", sent=sent))
    assert found.clean and found.counts["sent"] == len(KEPT)


def test_archiving_goes_on(spark: Any, url: str, mq: Any, lake: Path) -> None:
    """Into a table with deletion vectors and a column more."""
    mq.create_topic("orders", partitions=1)
    send(mq, "orders", 0, 50)
    done = archive(spark, ArchiveOptions({"url": url}, "orders", str(lake), fail_on_data_loss=False))
    assert done.messages and not done.behind
    everything = sorted([*KEPT, *range(50 - done.messages, 50)])
    there = deltalake.DeltaTable(lake / "orders")
    assert pa.table(there.scan(columns=["reviewed"])).num_rows == len(everything)
    table = DeltaLake(str(lake), "orders")
    assert numbers(table.frame(spark)) == everything
    nothing = ReplayOptions(
        {"url": url}, "orders", "orders", "b", folder=str(lake), start=datetime(2200, 1, 1, tzinfo=UTC)
    )
    assert replay(spark, nothing).messages == 0  # no file has such days
    table.compact()
    left = pa.table(deltalake.DeltaTable(lake / "orders").scan(columns=["offset"]))
    assert sorted(left["offset"].to_pylist()) == everything


def mapped(kind: Any, numbers: Iterator[int]) -> Any:
    """With names of columns in files apart from those of the table."""
    if isinstance(kind, dict) and kind["type"] == "struct":
        for column in kind["fields"]:
            names = {"id": next(numbers), "physicalName": column["name"]}
            column["metadata"].update({f"delta.columnMapping.{name}": names[name] for name in names})
            mapped(column["type"], numbers)
    elif isinstance(kind, dict):
        mapped(kind["elementType"], numbers)
    return kind


def test_features_that_are_refused(lake: Path) -> None:
    """Each with what to do; nothing is read or written."""
    log = lake / "orders" / "_delta_log"
    change = log / "00000000000000000006.json"
    lines = (log / "00000000000000000005.json").read_text().splitlines()
    metadata = json.loads(next(line for line in lines if '"metaData"' in line))
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
    for features, settings, said in (
        (["columnMapping"], {"delta.columnMapping.mode": "name"}, "cannot be read here: columnMapping"),
        ([], {"delta.constraints.small": "offset < 10"}, r"has a CHECK constraint \(small\)"),
        (["quantum"], {}, "has a feature that is not known here: .*'quantum' is not supported"),
        (["rowTracking", "domainMetadata"], {}, "cannot be written here: domainMetadata, rowTracking"),
    ):
        reads = ["deletionVectors", *(name for name in features if name in ("columnMapping", "quantum"))]
        action = json.loads(json.dumps(metadata))
        action["metaData"]["configuration"].update(settings)
        if "columnMapping" in features:
            schema = json.loads(action["metaData"]["schemaString"])
            action["metaData"]["schemaString"] = json.dumps(mapped(schema, iter(range(1, 100))))
        made = {**protocol, "readerFeatures": reads, "writerFeatures": [*{*reads, *features}]}
        change.write_text("\n".join(map(json.dumps, ({"protocol": made}, action))))
        with pytest.raises(InvalidSetting, match=f"{said}.*archive into another folder"):
            DeltaLake(str(lake), "orders").mark()
