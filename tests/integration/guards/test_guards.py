"""Guards on SQLite, PostgreSQL and MariaDB: what they let through, and what they refuse (R33).

What happens when a process dies in between: `test_guards_crash`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom import (
    Backoff,
    Dead,
    DecodeError,
    InvalidSetting,
    RetryLater,
    SchemaMismatch,
    UsageError,
    guards,
)
from postroom.clock import ManualClock
from tests.integration.guards.guarding import (
    SCOPE,
    Place,
    database_of,
    delivered,
    effects,
    empty,
    note,
    prepare,
)

WAIT_S = 60
KINDS = ("sqlite", "postgres", "mysql")


@pytest.fixture(scope="module", params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return database_of(request, tmp_path_factory)


@pytest.fixture
def place(database: Place) -> Place:
    empty(database)
    return database


@pytest.fixture
def connection(place: Place) -> Any:
    opened = place.connect()
    yield opened
    opened.close()


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """A connection to a file of SQLite, where it does not matter which database it is."""
    opened = sqlite3.connect(tmp_path / "books.db")
    prepare(opened)
    yield opened
    opened.close()


def once(connection: Any, message: postroom.Received, **more: Any) -> bool:
    with guards.once(connection, message, scope=SCOPE, **more) as fresh:
        if fresh:
            note(connection, message.offset)
    return fresh


# ---- once ----


def test_each_message_has_one_effect(place: Place, connection: Any) -> None:
    for offset in (1, 2, 1, 1, 3, 2):
        once(connection, delivered(offset))
        connection.commit()
    assert effects(place) == [1, 2, 3]


def test_what_is_rolled_back_comes_again(place: Place, connection: Any) -> None:
    assert once(connection, delivered(1))
    connection.rollback()
    assert effects(place) == []
    assert once(connection, delivered(1))
    connection.commit()
    assert effects(place) == [1]


def test_a_message_is_known_by_its_id_wherever_it_is_stored(file: Any) -> None:
    assert once(file, delivered(1, id="pay-1"))
    assert not once(file, delivered(7, id="pay-1"))
    assert once(file, delivered(1, id="pay-2"))
    assert not once(file, delivered(9, id="x"), id=lambda message: "pay-2")


def test_a_queue_that_is_made_anew_has_other_messages(file: Any) -> None:
    first = delivered(1)
    again = delivered(1)
    later = postroom.Received(b"", b"42", first.headers, "", None, None, 1, 1, None, first._delivery, 1)
    assert once(file, first)
    assert not once(file, again)
    assert once(file, later)


def test_scopes_do_not_know_each_other(file: Any) -> None:
    message = delivered(1)
    for scope in ("billing", "stock"):
        with guards.once(file, message, scope=scope) as fresh:
            assert fresh


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_second_delivery_at_the_same_time_waits_for_the_first(
    place: Place, connection: Any, ends: str
) -> None:
    """Committed: it is passed over. Rolled back: it is the one that counts."""
    waiting, found = threading.Event(), []

    def second() -> None:
        other = place.connect()
        waiting.set()
        found.append(once(other, delivered(1)))
        other.commit()
        other.close()

    assert once(connection, delivered(1))
    thread = threading.Thread(target=second)
    thread.start()
    assert waiting.wait(WAIT_S)
    thread.join(0.3)  # it must not have got through before the first one has ended
    assert thread.is_alive() and not found
    getattr(connection, ends)()
    thread.join(WAIT_S)
    assert found == [ends == "rollback"]
    assert effects(place) == [1]


def test_what_was_seen_is_forgotten_by_and_by(place: Place, connection: Any) -> None:
    clock = ManualClock()
    for offset in range(520):
        assert once(connection, delivered(offset), keep="1h", clock=clock)
    connection.commit()
    assert guards.prune(connection, clock=clock) == 0
    clock.advance(3601)
    assert guards.prune(connection, clock=clock) == 500  # a slice
    assert guards.prune(connection, clock=clock) == 20
    connection.commit()
    assert once(connection, delivered(1), clock=clock)


def test_two_that_forget_at_the_same_time_do_not_wait(place: Place, connection: Any) -> None:
    if place.kind == "sqlite":
        pytest.skip("one writes at a time there")
    clock = ManualClock()
    once(connection, delivered(1), keep="1h", clock=clock)
    connection.commit()
    clock.advance(3601)
    other = place.connect()
    assert guards.prune(connection, clock=clock) == 1
    assert guards.prune(other, clock=clock) == 0  # the other one is at it
    other.close()


# ---- newest ----


def test_only_larger_versions_are_handled(place: Place, connection: Any) -> None:
    for number, version in enumerate([2, 1, 2, 5, 4, 6]):
        with guards.newest(connection, delivered(number, version=version), scope=SCOPE) as newer:
            if newer:
                note(connection, version)
        connection.commit()
    assert effects(place) == [2, 5, 6]


def test_versions_are_counted_for_each_entity(file: Any) -> None:
    def newer(key: str, version: int) -> bool:
        by_value: Callable[[Any], int] = lambda message: int(message.value)  # noqa: E731
        message = delivered(key=key, value=b"%d" % version)
        with guards.newest(file, message, version=by_value, scope=SCOPE) as found:
            return found

    assert [newer("a", 1), newer("b", 1), newer("a", 1), newer("b", 3), newer("b", 2)] == [
        True, True, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (delivered(version="next"), "whole number"),
        (delivered(version=2**63), "64 bits"),
        (delivered(), "no header 'version'"),
        (delivered(key=None, version=1), "no key"),
    ],
)
def test_what_cannot_be_read_is_for_the_dead_letters(
    file: Any, message: postroom.Received, says: str
) -> None:
    with pytest.raises(DecodeError, match=says), guards.newest(file, message, scope=SCOPE):
        raise AssertionError("the handler ran")


# ---- in sequence ----


def in_sequence(
    connection: Any, version: int, key: str = "42", *, fails_at: int = 0, **more: Any
) -> list[int]:
    handled = []
    message = delivered(version + 1000, key=key, version=version)
    with guards.in_sequence(connection, message, scope=SCOPE, **more) as ready:
        for one in ready:
            handled.append(int(one.headers["version"]))
            note(connection, handled[-1], key)
            1 / (handled[-1] - fails_at)
    return handled


def test_what_comes_early_waits_for_its_turn(place: Place, connection: Any) -> None:
    came = [3, 1, 5, 1, 3, 2, 4, 2, 5, 6]
    handled = []
    for version in came:
        handled.append(in_sequence(connection, version))
        connection.commit()
    assert handled == [[], [1], [], [], [], [2, 3], [4, 5], [], [], [6]]
    assert effects(place) == [1, 2, 3, 4, 5, 6]
    assert guards.waiting(connection) == []


def test_a_message_that_waited_is_whole(place: Place, connection: Any) -> None:
    value, key = bytes(range(256)) * 10, "Käse"
    early = delivered(9, key=key, value=value, id="o-9", version=2, source="wëb")
    with guards.in_sequence(connection, early, scope=SCOPE) as ready:
        assert list(ready) == []
    connection.commit()
    with guards.in_sequence(connection, delivered(1, key=key, version=1), scope=SCOPE) as ready:
        _, found = ready
    for name in ("value", "key", "headers", "id", "topic", "partition", "offset", "timestamp", "attempt"):
        assert getattr(found, name) == getattr(early, name), name
    with pytest.raises(UsageError, match="acked then"):
        asyncio.run(found.ack())


def test_room_is_bounded_for_each_entity(file: Any) -> None:
    assert [in_sequence(file, version, room=2) for version in (3, 5)] == [[], []]
    with pytest.raises(RetryLater, match="no room") as later:
        in_sequence(file, 4, room=2, delay="7s")
    assert later.value.delay_ms == 7000
    assert in_sequence(file, 3, room=2) == []  # it waits already
    assert in_sequence(file, 2, "other", room=2) == []
    [first, second] = guards.waiting(file)
    assert (first.entity, first.following, first.messages, first.first) == ("42", 1, 2, 3)
    assert (second.entity, second.messages) == ("other", 1)
    assert in_sequence(file, 1, room=2) == [1]
    assert in_sequence(file, 2, room=2) == [2, 3]


def test_all_that_is_ready_has_to_be_handled(file: Any) -> None:
    in_sequence(file, 2)
    file.commit()
    guard = guards.in_sequence(file, delivered(1, version=1), scope=SCOPE)
    next(iter(guard.__enter__()))
    with pytest.raises(UsageError, match="1 messages were ready and not handled"):
        guard.__exit__(None, None, None)
    file.rollback()
    assert in_sequence(file, 1) == [1, 2]


def test_a_failure_of_what_was_released_undoes_all_of_it(place: Place, connection: Any) -> None:
    in_sequence(connection, 2)
    connection.commit()
    with pytest.raises(ZeroDivisionError):
        in_sequence(connection, 1, fails_at=2)
    connection.rollback()
    assert effects(place) == []
    assert in_sequence(connection, 1) == [1, 2]


def test_a_transaction_that_began_before_knows_what_was_kept_since(place: Place, connection: Any) -> None:
    """At MySQL's default isolation plain reads are of the moment when it began (I1)."""
    cursor = connection.cursor()
    cursor.execute("SELECT COUNT(*) FROM postroom_guards_waiting")
    cursor.fetchall()
    other = place.connect()
    for version in (2, 3):
        assert in_sequence(other, version) == []
        other.commit()
    assert move(other, 1, "created")
    other.commit()
    other.close()
    assert in_sequence(connection, 1) == [1, 2, 3]
    assert not move(connection, 1, "created")
    connection.commit()
    assert effects(place) == [1, 1, 2, 3]


# ---- transitions ----

ORDER = guards.Machine(
    {"created": {None}, "paid": {"created"}, "shipped": ["paid"], "cancelled": ["created", "paid"]}
)


def move(connection: Any, offset: int, event: str, attempt: int = 1, **more: Any) -> bool:
    message = delivered(offset, event=event, attempt=attempt)
    with guards.transitions(connection, message, rules=ORDER, scope=SCOPE, **more) as fits:
        if fits:
            note(connection, offset)
    return fits


def test_events_are_handled_where_they_fit(place: Place, connection: Any) -> None:
    with pytest.raises(RetryLater, match=r"'paid' does not fit '42', of which nothing is there yet") as later:
        move(connection, 2, "paid", delay="3s")
    connection.rollback()
    assert later.value.delay_ms == 3000
    for offset, event in ((1, "created"), (2, "paid"), (2, "paid"), (3, "shipped")):  # one came twice
        move(connection, offset, event)
        connection.commit()
    assert not move(connection, 4, "paid")  # once more, under another id
    connection.commit()
    with pytest.raises(
        Dead, match="'cancelled' does not fit '42', which is in state 'shipped', and no event"
    ):
        move(connection, 5, "cancelled")
    assert effects(place) == [1, 2, 3]


def test_what_never_fits_is_dead_at_once(file: Any) -> None:
    with pytest.raises(
        Dead, match="no rule has the event 'flown', which came for '42'; there are cancelled,"
    ):
        move(file, 2, "flown")
    assert not move(file, 2, "flown", exhausted="drop")


def test_hand_backs_may_back_off(file: Any) -> None:
    waits = []
    for attempt in range(1, 5):
        with pytest.raises(RetryLater) as later:
            move(file, 2, "paid", attempt, delay=Backoff("1s", 10, "1h"))
        waits.append(later.value.delay_ms // 1000)
    for wait, least in zip(waits, (1, 10, 100, 1000), strict=True):
        assert least <= wait <= 1.2 * least


def test_what_does_not_fit_is_handed_back_five_times(file: Any) -> None:
    for attempt in range(1, 6):
        with pytest.raises(RetryLater):
            move(file, 2, "paid", attempt)
    with pytest.raises(Dead, match="handed back 5 times"):
        move(file, 2, "paid", 6)
    assert not move(file, 2, "paid", 6, exhausted="drop")
    with pytest.raises(Dead):
        move(file, 2, "paid", 1, attempts=0)


def test_what_does_not_fit_leaves_nothing_even_if_it_is_committed(file: Any) -> None:
    with pytest.raises(RetryLater):
        move(file, 2, "paid")
    file.commit()
    assert move(file, 1, "created")
    assert move(file, 2, "paid")


def test_what_was_given_up_may_fit_later(file: Any) -> None:
    assert not move(file, 2, "paid", 6, exhausted="drop")
    assert move(file, 1, "created")
    assert move(file, 2, "paid", 7)


def test_the_state_may_be_in_a_row_of_the_users(place: Place, connection: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("DROP TABLE IF EXISTS orders")
    cursor.execute("CREATE TABLE orders (id VARCHAR(20) PRIMARY KEY, status VARCHAR(20))")
    cursor.execute("INSERT INTO orders VALUES ('42', 'created')")
    connection.commit()

    def load(given: Any, entity: str) -> str | None:
        assert given is connection
        cursor = given.cursor()
        cursor.execute(f"SELECT status FROM orders WHERE id = '{entity}'")
        row = cursor.fetchone()
        return row and str(row[0])

    def save(given: Any, entity: str, state: str) -> None:
        given.cursor().execute(f"UPDATE orders SET status = '{state}' WHERE id = '{entity}'")

    assert move(connection, 1, "paid", load=load, save=save)
    assert load(connection, "42") == "paid"
    connection.rollback()
    assert load(connection, "42") == "created"


# ---- many at once ----


@pytest.mark.parametrize("name", ["once", "newest", "in_sequence", "transitions"])
def test_many_deliveries_at_once_do_not_lock_each_other_out(place: Place, name: str) -> None:
    """Each message comes twice, to different threads; what is new is not kept from each other (deadlocks)."""
    how: dict[str, Any] = {"rules": {"1": None, "2": "1", "3": "2"}} if name == "transitions" else {}
    failures: list[BaseException] = []
    messages = [
        delivered(10 * key + version, key=f"k{key}", version=version, event=version)
        for version in (1, 2, 3)
        for key in range(6)
    ]

    def deliver(mine: list[postroom.Received]) -> None:
        connection = place.connect()
        waiting = list(mine)
        try:
            while waiting:
                message = waiting.pop(0)
                try:
                    with getattr(guards, name)(connection, message, scope=SCOPE, **how) as decided:
                        for one in decided if isinstance(decided, guards.Ready) else [message] * decided:
                            note(connection, one.offset)
                    connection.commit()
                except RetryLater:
                    connection.rollback()
                    waiting.append(message)
        except BaseException as error:
            failures.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=deliver, args=(messages[n::2],)) for n in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []
    found = effects(place)
    if name == "newest":  # an older one may have come too late
        assert set(found) >= {10 * key + 3 for key in range(6)}
        assert len(found) == len(set(found))
    else:
        assert found == sorted(message.offset for message in messages)


# ---- what is refused ----


def test_without_a_transaction_nothing_is_handled(place: Place, connection: Any) -> None:
    if place.kind == "sqlite":
        connection.isolation_level = None
    elif place.kind == "postgres":
        connection.autocommit = True
    else:
        connection.autocommit(True)
    with pytest.raises(UsageError, match="begin a transaction first"):
        once(connection, delivered(1))
    connection.cursor().execute("BEGIN")
    assert once(connection, delivered(1))
    connection.cursor().execute("COMMIT")
    assert effects(place) == [1]


def test_missing_tables_are_named_with_their_cure(place: Place, connection: Any) -> None:
    for name in (
        "postroom_guards",
        "postroom_guards_seen",
        "postroom_guards_entities",
        "postroom_guards_waiting",
    ):
        connection.cursor().execute(f"DROP TABLE {name}")
    connection.commit()
    with pytest.raises(SchemaMismatch, match=r"guards.create_tables\(connection\) once"):
        once(connection, delivered(1))
    connection.rollback()
    for statement in guards.ddl(place.kind):
        connection.cursor().execute(statement)
    connection.commit()
    guards.create_tables(connection)  # once more is harmless
    assert once(connection, delivered(1))


def test_old_and_newer_tables_are_told_apart(file: Any) -> None:
    file.execute("ALTER TABLE postroom_guards_entities DROP COLUMN waiting")
    with pytest.raises(SchemaMismatch, match="are missing in this database, or old"):
        in_sequence(file, 1)
    file.rollback()
    file.execute("UPDATE postroom_guards SET version = 2")
    with pytest.raises(SchemaMismatch, match="upgrade this program"):
        guards.create_tables(file)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda file: guards.once(file),
        lambda file: guards.once(None),
        lambda file: guards.once(file, delivered(), keep=0),
        lambda file: guards.in_sequence(file, delivered(), room=-1),
        lambda file: guards.transitions(file, delivered(), rules={}),
        lambda file: guards.transitions(file, delivered(), rules={"paid": 3}),
        lambda file: guards.transitions(file, delivered(), rules={("a", "b"): "c", "d": {"e"}}),
        lambda file: guards.transitions(file, delivered(), rules=ORDER, exhausted="stop"),
        lambda file: guards.transitions(file, delivered(), rules=ORDER, attempts=-1),
        lambda file: guards.transitions(file, delivered(), rules=ORDER, load=lambda *_: None),
        lambda file: guards.ddl("oracle"),
    ],
)
def test_wrong_settings_are_refused(file: Any, wrong: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidSetting):
        wrong(file)


async def test_other_kinds_of_connections_are_refused() -> None:
    stranger = type("AsyncConnection", (), {"__module__": "psycopg"})()  # only SQLAlchemy's have a sync side
    with pytest.raises(InvalidSetting, match="not a connection that Postroom knows"):
        await guards.once(stranger, delivered(1), scope=SCOPE).__aenter__()


def test_alembic_does_not_see_the_tables(file: Any) -> None:
    names = [row[0] for row in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    seen = [name for name in names if postroom.Outbox().include_name(name, "table", {})]
    assert (len(names), seen) == (5, ["effects"])


def test_a_guard_takes_a_message_of_a_group_or_a_scope(file: Any) -> None:
    with pytest.raises(UsageError, match="scope="), guards.once(file, delivered(1)):
        pass
    with pytest.raises(UsageError, match="takes a received message, not bytes"), guards.once(file, b"1"):
        pass
