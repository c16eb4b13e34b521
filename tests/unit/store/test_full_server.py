"""A server without space says so with many codes: all of them are `StoreFull`, which is tried again."""

from __future__ import annotations

import pymysql
import pytest

from postroom.errors import StoreError, StoreFull
from postroom.store.dialects.mysql import MysqlDialect
from postroom.store.sql.session import Area


def explained(code: int, said: str) -> StoreError | None:
    dialect = MysqlDialect({}, "mysql://u@db/queue")
    return dialect.error(pymysql.err.OperationalError(code, said), Area.LOG)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "Error writing file './queue/postroom_log_9.frm' (Errcode: 28 \"No space left on device\")"),
        (1004, "Can't create file './queue/x.frm' (errno: 28 \"No space left on device\")"),
        (1005, 'Can\'t create table `queue`.`x` (errno: 28 "No space left on device")'),
        (1030, 'Got error 28 "No space left on device" from storage engine InnoDB'),
        (1114, "The table 'postroom_log_5' is full"),
    ],
)
def test_no_space_is_named_whatever_it_was_wanted_for(code: int, said: str) -> None:
    error = explained(code, said)
    assert isinstance(error, StoreFull) and error.retriable
    assert "has no space left" in str(error) and "u@db" not in error.details["_served"]


def test_other_errors_with_a_number_are_not_taken_for_it() -> None:
    assert not isinstance(explained(1005, "Can't create table `queue`.`x` (errno: 121)"), StoreFull)
    assert not isinstance(explained(1064, "You have an error in your SQL syntax near '28'"), StoreFull)
