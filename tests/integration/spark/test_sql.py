"""Topics as SQL tables, in a catalog and by CREATE TABLE."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import postroom.spark
from tests.integration.spark.streams import send

TOKEN = "pst_" + "x" * 43
NUMBERS = itertools.count()  # a session makes a catalog once, and keeps it: each test has another


@pytest.fixture
def sql(spark: Any, mq: Any) -> Iterator[Any]:
    """With a catalog `shop` of a served queue, which wants a token."""
    mq.create_topic("orders", partitions=2)
    mq.create_topic("copies", partitions=1)
    mq.create_topic("eu.orders", partitions=1)
    send(mq, "orders", 0, 20)
    with mq.serve("127.0.0.1", 0, token=TOKEN) as served:
        name = f"shop{next(NUMBERS)}"
        assert postroom.spark.session(catalog={name: {"url": served.url, "token": TOKEN}}) is spark
        yield lambda text: spark.sql(text.format(shop=name, url=served.url, token=TOKEN))
    spark.sql("DROP TABLE IF EXISTS sql_orders")


def count(found: Any) -> int:
    number: int = found.first()[0]
    return number


def test_a_catalog(spark: Any, sql: Any, mq: Any, tmp_path: Path) -> None:
    assert [row.tableName for row in sql("SHOW TABLES IN {shop}").collect()] == [
        "copies",
        "eu.orders",
        "orders",
    ]
    name = sql("SHOW CATALOGS LIKE '{shop}'").first()[0]
    assert sql("SELECT count(*), max(cast(cast(value as string) as int)) FROM {shop}.orders").first() == (
        20,
        19,
    )
    assert count(sql("SELECT count(*) FROM {shop}.`eu.orders`")) == 0
    some = 'SELECT count(*) FROM {shop}.orders WITH (endingOffsets = \'{{"orders": {{"0": 0}}}}\')'
    assert 0 < count(sql(some)) < 20

    table = spark.table(f"{name}.orders")
    sql("INSERT INTO {shop}.orders (key, value) VALUES ('k', 'v')")
    sql("INSERT INTO {shop}.orders SELECT value, key FROM {shop}.orders WHERE cast(value as string) = '0'")
    assert table.count() == 22  # a table shows what is there now, and by the names of its columns
    assert [bytes(row.key) for row in table.where("cast(value as string) = '0'").collect()] == [b"k0"] * 2
    frame = spark.createDataFrame([("k", "w")], "key string, value string")
    frame.writeTo(f"{name}.orders").append()
    assert mq.topic("orders").messages == 23

    read = spark.readStream.option("startingOffsets", "earliest").table(f"{name}.orders")
    query = read.writeStream.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True)
    query.toTable(f"{name}.copies").awaitTermination()
    assert mq.topic("copies").messages == 23
    assert spark.catalog.tableExists(f"{name}.orders") and not spark.catalog.tableExists(f"{name}.order")


REFUSED = {
    "SELECT * FROM {shop}.order": "there is no topic 'order': did you mean 'orders'",
    "SELECT * FROM {shop}.eu.orders": "a name with dots is quoted: shop",
    "INSERT OVERWRITE {shop}.orders SELECT 'v' AS value": "a topic is not overwritten: write with",
    "INSERT INTO {shop}.orders VALUES ('k', 'v')": "INSERT INTO t (key, value) VALUES",
    "INSERT INTO {shop}.orders (value) VALUES (1)": "column value: it is binary or string, and here",
    "DROP TABLE {shop}.orders": "use postroom topic delete orders",
    "CREATE TABLE {shop}.more (value STRING)": "use postroom topic create more",
    "ALTER TABLE {shop}.orders ADD COLUMN x INT": "use postroom topic alter orders",
    "CREATE TABLE sql_typo USING postroom OPTIONS (url '{url}', subscrib 'orders')": "no option subscrib:",
}


def test_refused(sql: Any, mq: Any) -> None:
    for text, said in REFUSED.items():
        with pytest.raises(Exception) as error:  # noqa: PT011
            sql(text).collect()
        assert said in str(error.value).splitlines()[0]
    assert mq.topic("orders").messages == 20


def test_tables(sql: Any, spark: Any, mq: Any) -> None:
    sql(
        "CREATE TABLE sql_orders USING postroom OPTIONS (url '{url}', token '{token}', subscribe 'orders', "
        "maxOffsetsPerTrigger 5)"
    )
    assert count(sql("SELECT count(*) FROM sql_orders")) == 20
    sql("INSERT INTO sql_orders (key, value) VALUES ('k', 'v')")
    spark.createDataFrame([("k", "w")], "key string, value string").writeTo("sql_orders").append()
    assert count(sql("SELECT count(*) FROM sql_orders")) == 22 == mq.topic("orders").messages
    with pytest.raises(Exception, match="a topic is not overwritten"):
        sql("INSERT OVERWRITE sql_orders SELECT 'v' AS value")
    sql(
        "CREATE OR REPLACE TEMPORARY VIEW sql_view USING postroom OPTIONS (url '{url}', token '{token}', "
        "subscribe 'orders')"
    )
    assert count(sql("SELECT count(*) FROM sql_view")) == 22
    sql("DROP VIEW sql_view")


def test_the_token_is_not_shown(sql: Any) -> None:
    sql("CREATE TABLE sql_orders USING postroom OPTIONS (url '{url}', token '{token}', subscribe 'orders')")
    asked = ["SHOW TABLE EXTENDED LIKE 'sql_orders'", "SET"]
    for table in ("{shop}.orders", "sql_orders"):
        asked += [
            f"DESCRIBE EXTENDED {table}",
            f"SHOW CREATE TABLE {table}",
            f"SHOW TBLPROPERTIES {table}",
            f"EXPLAIN EXTENDED SELECT * FROM {table}",
            f"EXPLAIN FORMATTED SELECT * FROM {table}",
            f"EXPLAIN EXTENDED INSERT INTO {table} (value) VALUES ('v')",
        ]
    for text in asked:
        shown = str(sql(text).collect())
        assert len(shown) > 1 and TOKEN not in shown, text
