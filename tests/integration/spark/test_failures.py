"""What a user sees of an error: our sentence, as near to the beginning as Spark has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import postroom.spark
from postroom.errors import DataLoss, InvalidMessage, InvalidSetting, UnknownTopic
from tests.integration.spark.streams import send

LOST = "10 offsets were dropped before they were read: topic 'orders' partition 0, 0 to 9."


@pytest.fixture
def queue(mq: Any, url: str) -> dict[str, str]:
    mq.create_topic("orders", partitions=1)
    send(mq, "orders", 0, 10)
    mq.purge("orders")
    send(mq, "orders", 10, 5)
    return {"url": url}


def said(error: pytest.ExceptionInfo[Exception], sentence: str, *, line: int = 0) -> None:
    shown = str(error.value)
    assert sentence in shown.splitlines()[line], shown
    assert "Traceback" not in shown and "/postroom/" not in shown


def test_batches(spark: Any, queue: dict[str, str]) -> None:
    read = spark.read.format("postroom").options(**queue)
    with pytest.raises(Exception) as error:  # noqa: PT011
        read.option("subscribe", "order").load().count()
    said(error, "there is no topic 'order': did you mean 'orders'?")
    with pytest.raises(UnknownTopic, match=r"^there is no topic 'order'"), postroom.spark.explained():
        read.option("subscribe", "order").load().count()

    frame = spark.sql("SELECT cast(null AS string) value")
    write = frame.write.format("postroom").options(**queue, topic="orders").mode("append")
    with pytest.raises(Exception) as error:  # noqa: PT011
        write.save()
    said(error, "InvalidMessage: column value: it is null in 1 rows", line=1)  # the first is Spark's
    with pytest.raises(InvalidMessage), postroom.spark.explained():
        write.save()


def test_an_error_of_somebody_else_keeps_its_traceback(spark: Any, queue: dict[str, str]) -> None:
    """In the same Python processes, which Spark uses again."""

    def broken(batches: Any) -> Any:
        raise ZeroDivisionError("theirs")
        yield from batches

    with pytest.raises(Exception, match="theirs") as error:
        spark.range(1).mapInArrow(broken, "id long").collect()
    assert "Traceback" in str(error.value) and "in broken" in str(error.value)


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"subscribe": "orders", "startingOffset": "x"}, InvalidSetting, "there is no option startingoffset"),
        ({"subscribe": "order"}, UnknownTopic, "there is no topic 'order': did you mean 'orders'?"),
        ({"subscribe": "orders", "startingOffsets": '{"orders": {"0": 0}}'}, DataLoss, LOST),
    ],
)
def test_streams(
    spark: Any, queue: dict[str, str], tmp_path: Path, options: dict[str, str], kind: Any, sentence: str
) -> None:
    read = spark.readStream.format("postroom").options(**queue, **options).load()
    write = read.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    query = write.trigger(availableNow=True).start()
    with pytest.raises(Exception) as error:  # noqa: PT011
        query.awaitTermination()
    said(error, sentence)
    assert sentence in str(query.exception()).splitlines()[0]
    with pytest.raises(kind, match=f"^{sentence[:20]}"), postroom.spark.explained():
        query.awaitTermination()
