"""Handlers as tasks: sent to by name, told apart by it, and clear about what fails."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

import postroom
from postroom import App, Backoff, Connection, Dead, InvalidMessage, Message, Outbox, UsageError
from postroom.clock import ManualClock
from postroom.testing.fixture import run_until_idle
from tests.contract.stores import everywhere


@dataclass
class Mail:
    to: str


class Page(BaseModel):
    number: int = Field(alias="pageNumber")


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("work", partitions=2)
    return connection


@pytest.fixture
def app(mq: Connection) -> App:
    return App(mq)


def two_tasks(app: App, done: list[Any]) -> tuple[Any, Any]:
    @app.subscribe("work", group="jobs", name="mail")
    async def mail(letter: Mail) -> None:
        done.append(letter)

    @app.subscribe("work", group="jobs", name="print")
    def print_page(page: Page, message: Any) -> None:
        done.append((page.number, message.header("source"), message.text))

    return mail, print_page


@everywhere
async def test_tasks_of_one_topic_and_group_get_their_own_messages(app: App, mq: Connection) -> None:
    done: list[Any] = []
    mail, page = two_tasks(app, done)
    for number in range(5):
        await mail.send(Mail(str(number)), connection=mq)
        await page.send(Page(pageNumber=number), connection=mq, headers={"source": "web"}, key="k")
    assert (await run_until_idle(app)).errors == []
    assert [one for one in done if isinstance(one, Mail)] != []
    assert sorted(one.to for one in done if isinstance(one, Mail)) == list("01234")
    assert [one for one in done if not isinstance(one, Mail)] == [
        (number, "web", f'{{"pageNumber":{number}}}') for number in range(5)
    ]


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"x-postroom-task": "jobs/scan"}, "is for task 'jobs/scan', and this app knows 'mail', 'print'"),
        ({}, "names no task, and this app has several for it: 'mail', 'print'"),
        ({"x-postroom-task": "others/mail"}, "names no task"),
    ],
)
async def test_a_message_for_a_task_that_nobody_knows_is_a_dead_letter(
    app: App, mq: Connection, headers: dict[str, str], says: str
) -> None:
    done: list[Any] = []
    two_tasks(app, done)
    await mq.send("work", Mail("ann"), headers=headers)
    (error,) = (await run_until_idle(app)).errors
    assert isinstance(error, postroom.UnknownTask) and not done
    (letter,) = await mq.dead_letters("work", "jobs")
    assert says in letter.reason and letter.attempts == 1


async def test_a_removed_task_is_not_handled_by_the_one_that_is_left(app: App, mq: Connection) -> None:
    done: list[Any] = []

    @app.subscribe("work", group="jobs")
    async def mail(letter: dict[str, Any]) -> None:
        done.append(letter)

    await mq.send("work", {"to": "ann"}, headers={"x-postroom-task": "jobs/scan"})
    await mq.send("work", {"to": "bob"}, headers={"x-postroom-task": "audit/scan"})
    await run_until_idle(app)
    assert done == [{"to": "bob"}]  # another group's task: this group sees the topic, too
    assert "this app knows none" in (await mq.dead_letters("work", "jobs"))[0].reason


async def test_the_only_task_takes_messages_that_name_none(app: App, mq: Connection) -> None:
    done: list[Mail] = []

    @app.subscribe("work", group="jobs", name="mail")
    async def mail(letter: Mail) -> None:
        done.append(letter)

    await mq.send("work", Mail("ann"))
    await mail.send(Mail("bob"), connection=mq)
    await run_until_idle(app)
    assert sorted(one.to for one in done) == ["ann", "bob"]


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({}, {}, "both handle topic 'work' for group 'jobs'.*Give each a name.*mail.send"),
        ({"name": "a"}, {"name": "a"}, "as task 'a': give one of them another name="),
        ({"name": "a", "concurrency": 1}, {"name": "b"}, "mail has concurrency=1 and scan has concurrency=8"),
        ({"name": "a", "lease": 10}, {"name": "b", "lease": 20}, "has lease=10 and scan has lease=20"),
        ({"name": "a"}, {"batch": 10}, "handlers of lists"),
        ({"name": "a", "batch": 10}, {}, "name='a' tells tasks of one group apart, and batch="),
        ({"name": "a b"}, {}, "'a b' is not a task's name"),
    ],
)
async def test_tasks_that_cannot_share_are_refused(
    app: App, first: dict[str, Any], second: dict[str, Any], says: str
) -> None:
    async def mail(bodies: list[bytes]) -> None: ...

    async def scan(bodies: list[bytes]) -> None: ...

    def register() -> None:
        app.subscribe("work", group="jobs", **first)(mail)
        app.subscribe("work", group="jobs", **second)(scan)

    with pytest.raises((UsageError, postroom.InvalidName), match=says):
        register()
    assert len(app.subscriptions) < 2


async def test_a_task_is_called_as_the_function_that_it_was(app: App) -> None:
    @app.subscribe("work", group="a")
    @app.subscribe("work", group="b")
    async def mail(letter: Mail, loud: bool = False) -> str:
        """Sends it."""
        return letter.to

    assert await mail(Mail("ann")) == await mail(letter=Mail("ann")) == "ann"  # type: ignore[call-arg]
    assert (mail.__name__, mail.__doc__, mail.topic, mail.group) == ("mail", "Sends it.", "work", "a")
    assert [one.group for one in app.subscriptions] == ["b", "a"]


async def test_a_running_app_sends_through_its_own_connection(app: App, mq: Connection) -> None:
    done = asyncio.Event()

    @app.subscribe("work", group="jobs")
    def mail(letter: Mail) -> None:
        if letter.to == "ann":
            mail.send_sync(Mail("bob"))  # from the handler's thread
        else:
            loop.call_soon_threadsafe(done.set)

    loop = asyncio.get_running_loop()
    async with app:
        receipt = await mail.send(Mail("ann"), id="first")
        assert (receipt.topic, receipt.id) == ("work", "first")
        with pytest.raises(UsageError, match="would block this event loop"):
            mail.send_sync(Mail("ann"))
        await asyncio.wait_for(done.wait(), 30)


def test_an_app_that_does_not_run_sends_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()

    @app.subscribe("work", group="jobs")
    async def mail(letter: Mail) -> None: ...

    monkeypatch.delenv("POSTROOM_URL", raising=False)
    with pytest.raises(UsageError, match="the app names no queue: set POSTROOM_URL"):
        mail.send_sync(Mail("ann"))
    monkeypatch.setenv("POSTROOM_URL", f"sqlite:///{tmp_path}/queue.db")
    with postroom.sync.connect(f"sqlite:///{tmp_path}/queue.db") as mq:
        mq.create_topic("work", partitions=1)

        async def several() -> None:
            await asyncio.gather(*(mail.send(Mail(str(n))) for n in range(3)))

        asyncio.run(several())
        asyncio.run(several())  # another loop, another connection
        assert mail.send_sync(Mail("last"), key="k") is not None
        sent = [message.decode(Mail).to for message in mq.read("work")]
        assert sorted(sent) == ["0", "0", "1", "1", "2", "2", "last"]
    app._ways._apart()._process.close()


def test_a_queue_in_memory_is_not_sent_to_from_outside() -> None:
    app = App("memory://")

    @app.subscribe("work", group="jobs")
    async def mail(letter: Mail) -> None: ...

    with pytest.raises(UsageError, match="a queue in memory is only there while it does"):
        mail.send_sync(Mail("ann"))


def test_a_task_joins_the_transaction_of_the_caller(tmp_path: Path) -> None:
    app, outbox = App("memory://"), Outbox()
    db = sqlite3.connect(tmp_path / "shop.db")
    outbox.create_table(db)

    @app.subscribe("work", group="jobs", name="mail")
    async def mail(letter: Mail) -> None: ...

    with pytest.raises(UsageError, match="the app has no outbox"):
        mail.send(Mail("ann"), connection=db)
    app.outbox(outbox, f"sqlite:///{tmp_path}/shop.db")
    with outbox.transaction(db):
        mail.send(Mail("ann"), connection=db, key="k")
        assert mail.send_sync(Mail("bob"), connection=db) is None
    with outbox.transaction(db):
        mail.send(Mail("eve"), connection=db)
        db.rollback()
    with pytest.raises(UsageError, match="timeout="), outbox.transaction(db):
        mail.send(Mail("eve"), connection=db, timeout=3)
    assert outbox.status(db).messages == 2
    db.close()


async def test_the_body_of_a_task_is_encoded_by_its_annotation(app: App, mq: Connection) -> None:
    got: list[Any] = []

    @app.subscribe("work", group="jobs")
    async def take(body: Mail | str | None) -> None:
        got.append(body)

    for body in (Mail("ann"), "text", None):
        await take.send(body, connection=mq, key="k")
    with pytest.raises(InvalidMessage, match="type object cannot be sent"):
        await take.send(object(), connection=mq)  # type: ignore[arg-type]
    await run_until_idle(app)
    assert got == [Mail("ann"), "text", None]


@everywhere
async def test_every_way_to_send_encodes(connection: Connection, tmp_path: Path) -> None:
    await connection.create_topic("mails", partitions=1)
    await connection.send("mails", Mail("send"))
    await connection.send_many("mails", [Mail("many"), Message(Mail("message"), key="k")])
    async with connection.producer("mails") as producer:
        await producer.send(Mail("producer"))
        await (await producer.post(Mail("post")))
    async with connection.producer("mails", confirm=False) as one_way:
        await one_way.send(Mail("one way"))
    async with connection.producer("mails", spool=tmp_path / "mails.spool") as spooled:
        await spooled.send(Mail("spool"))
        assert await spooled.forwarded(timeout=60)
    async for message in connection.read("mails"):
        assert message.decode(Mail) == Mail(message.json()["to"])
    sent = {message.json()["to"] async for message in connection.read("mails")}
    assert sent == {"send", "many", "message", "producer", "post", "one way", "spool"}


# ---- failures ----


async def test_the_log_says_which_message_failed_and_what_happens_next(
    app: App, mq: Connection, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    @app.subscribe("work", group="jobs", max_attempts=2, retry=Backoff(8, 2, "10m"))
    async def mail(letter: Mail) -> None:
        if letter.to == "dead":
            raise Dead("no such address")
        raise ValueError("negative")

    await mail.send(Mail("ann"), connection=mq, id="o-42", key="k7", slot=0)
    with caplog.at_level(logging.INFO, "postroom.app"):
        await run_until_idle(app)
        first = caplog.records[-1]
        clock.advance(8)
        await run_until_idle(app)
        last = caplog.records[-1]
        await mail.send(Mail("dead"), connection=mq)
        await run_until_idle(app)
    where = "handler mail: message o-42, key 'k7', work/0 offset 0"
    assert first.getMessage() == f"{where}, attempt 1 of 2: ValueError('negative'); again in 8s"
    assert last.getMessage() == f"{where}, attempt 2 of 2: ValueError('negative'); moved to dead letters"
    assert "Dead('no such address'); moved to dead letters" in caplog.records[-1].getMessage()
    assert first.exc_info is not None and first.exc_info[2] is not None
    assert first.exc_info[2].tb_frame.f_code.co_name == "mail"  # and not what calls handlers


@pytest.mark.parametrize("plain", [False, True])
async def test_a_dead_letter_keeps_the_traceback_from_where_the_handler_begins(
    app: App, mq: Connection, plain: bool
) -> None:
    def fail(letter: Mail) -> None:
        raise ValueError(f"negative {letter.to}")

    async def fail_async(letter: Mail) -> None:
        fail(letter)

    app.subscribe("work", group="jobs", max_attempts=1)(fail if plain else fail_async)
    await mq.send("work", Mail("x" * 10_000))
    await run_until_idle(app)
    (letter,) = await mq.dead_letters("work", "jobs")
    assert letter.reason.startswith("ValueError: negative xxx") and "\n" not in letter.reason
    assert letter.traceback.startswith("Traceback (most recent call last):\n")
    assert len(letter.reason) + len(letter.traceback) <= 4000


async def test_a_short_traceback_is_whole(app: App, mq: Connection) -> None:
    def fail(letter: Mail) -> None:
        try:
            {}["no such key"]
        except KeyError as error:
            raise Dead("gone") from error

    app.subscribe("work", group="jobs")(fail)
    await mq.send("work", Mail("ann"))
    await run_until_idle(app)
    (letter,) = await mq.dead_letters("work", "jobs")
    assert letter.reason == "gone"
    assert "KeyError: 'no such key'" in letter.traceback and ", in fail\n" in letter.traceback
    assert "postroom/client/app" not in letter.traceback
