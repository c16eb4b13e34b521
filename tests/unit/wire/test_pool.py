"""Which broker is asked, and what becomes of a request whose broker goes away; brokers that only pretend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from postroom.endpoint import requests as r
from postroom.endpoint.operations import OPERATIONS, Operation
from postroom.errors import BrokerUnavailable, NotAuthenticated, PostroomError, ProtocolError
from postroom.wire import messages as m
from postroom.wire.client import pool as module
from postroom.wire.client.link import Link, LinkLost
from postroom.wire.client.pool import Pool, ranked
from postroom.wire.messages import BrokerInfo, Welcome

HELLO = m.Hello(1, 1, "test")
TOPIC, PURGE, POLL = OPERATIONS["topic"], OPERATIONS["purge"], OPERATIONS["poll"]
LOST, NOT_SENT = LinkLost("gone", sent=True), LinkLost("gone", sent=False)
SILENT = LinkLost("does not answer", sent=True)
STOPPING = BrokerUnavailable("it is stopping")


class Pretended:
    """A link that was made: it answers with its broker's id, or as it was told to."""

    def __init__(self, town: Town, address: str, broker: str) -> None:
        self.address, self.gone, self.silent, self.town = address, False, False, town
        self.greeted_at, self.takes, self.told = 0.0, True, list[Callable[[Any], None]]()
        brokers = tuple(BrokerInfo(id, where) for where, id in town.brokers.items() if isinstance(id, str))
        self.welcome = Welcome(1, broker, "me", 0, 1 << 20, brokers)

    async def call(self, operation: Operation, request: Any, body: Any = (), early: Any = None) -> Any:
        self.town.asked.append((self.welcome.broker, operation.name, request))
        await asyncio.sleep(0)
        outcomes = self.town.outcomes.get(self.welcome.broker, [])
        outcome = outcomes.pop(0) if outcomes else None
        if outcome is None:
            return self.welcome.broker
        self.gone = isinstance(outcome, LinkLost)
        self.silent = outcome is SILENT
        raise outcome

    def call_soon(self, operation: Operation, request: Any, body: Any, told: Callable[[Any], None]) -> bool:
        self.town.asked.append((self.welcome.broker, operation.name, request))
        self.told.append(told)
        return self.takes

    async def close(self) -> None:
        self.gone = True


class Town:
    """Brokers by address: an id, or the error that whoever connects is told."""

    def __init__(self) -> None:
        self.brokers: dict[str, str | PostroomError] = {}
        self.outcomes: dict[str, list[Exception]] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.connected: list[str] = []
        self.on_connect: Callable[[str], None] = lambda address: None

    async def connect(self, address: str, hello: Any, tls: Any, *, timeout_ms: int, tuning: Any) -> Link:
        self.connected.append(address)
        await asyncio.sleep(0)
        self.on_connect(address)
        found = self.brokers.get(address, BrokerUnavailable(f"nobody at {address}"))
        if isinstance(found, PostroomError):
            raise type(found)(str(found))
        return cast(Link, Pretended(self, address, found))

    @property
    def who(self) -> list[str]:
        return [broker for broker, _, _ in self.asked]


@pytest.fixture
def town(monkeypatch: pytest.MonkeyPatch) -> Town:
    town = Town()
    monkeypatch.setattr(module, "connect", town.connect)
    return town


def pool(*seeds: str) -> Pool:
    return Pool(seeds, HELLO, None, "")


def first_for(key: str, *ids: str) -> list[str]:
    return ranked(key, [(id, "") for id in ids])


async def test_one_address_is_enough_to_know_all(town: Town) -> None:
    town.brokers = {"a:1": "A", "b:1": "B"}
    asked = pool("a:1")
    await asked.open()
    answers = {await asked.call(TOPIC, r.Named("t"), key=f"p{i}") for i in range(20)}
    assert answers == {"A", "B"}
    assert sorted(town.connected) == ["a:1", "b:1"]


async def test_the_next_broker_is_asked_when_one_goes_away(town: Town) -> None:
    town.brokers = {"a:1": "A", "b:1": "B"}
    asked = pool("a:1")
    await asked.open()
    one, other = first_for("k", "A", "B")
    town.outcomes[one] = [LOST]
    assert await asked.call(TOPIC, r.Named("t"), key="k") == other
    assert town.who == [one, other]


async def test_a_connection_may_break_while_the_only_broker_lives(town: Town) -> None:
    town.brokers, town.outcomes = {"a:1": "A"}, {"A": [LOST]}
    assert await pool("a:1").call(TOPIC, r.Named("t")) == "A"
    assert town.connected == ["a:1", "a:1"]


async def test_a_broker_that_loses_us_again_and_again_is_given_up(town: Town) -> None:
    town.brokers, town.outcomes = {"a:1": "A"}, {"A": [LOST] * 9}
    with pytest.raises(BrokerUnavailable, match="no other broker is there"):
        await pool("a:1").call(TOPIC, r.Named("t"))
    assert town.who == ["A", "A"]


async def test_a_broker_that_came_back_is_another(town: Town) -> None:
    town.brokers, town.outcomes = {"a:1": "A"}, {"A": [LOST]}
    asked = pool("a:1")
    await asked.open()
    town.brokers = {"a:1": "A2"}
    assert await asked.call(TOPIC, r.Named("t")) == "A2"


async def test_what_may_be_done_twice_is_not_repeated(town: Town) -> None:
    town.brokers, town.outcomes = {"a:1": "A", "b:1": "B"}, {"A": [LOST], "B": [LOST]}
    with pytest.raises(BrokerUnavailable, match="it is not known whether purge was done; look, then try"):
        await pool("a:1").call(PURGE, r.Named("t"))
    assert len(town.asked) == 1


async def test_what_never_left_is_asked_elsewhere(town: Town) -> None:
    town.brokers = {"a:1": "A", "b:1": "B"}
    one, other = first_for("k", "A", "B")
    asked = pool("a:1")
    await asked.open()
    town.outcomes[one] = [NOT_SENT]
    assert await asked.call(PURGE, r.Named("t"), key="k") == other


async def test_a_poll_is_repeated_as_one_only_if_it_may_have_arrived(town: Town) -> None:
    town.brokers, town.outcomes = {"a:1": "A"}, {"A": [NOT_SENT]}
    await pool("a:1").call(POLL, r.Named("first"), again=lambda: r.Named("repeated"))
    assert [request.name for _, _, request in town.asked] == ["first", "first"]
    town.asked, town.outcomes = [], {"A": [LOST]}
    await pool("a:1").call(POLL, r.Named("first"), again=lambda: r.Named("repeated"))
    assert [request.name for _, _, request in town.asked] == ["first", "repeated"]


async def test_a_broker_that_is_stopping_is_not_asked_again(town: Town) -> None:
    town.brokers, town.outcomes = {"a:1": "A"}, {"A": [STOPPING] * 9}
    with pytest.raises(BrokerUnavailable, match="no other broker"):
        await pool("a:1").call(PURGE, r.Named("t"))
    assert town.who == ["A"]


async def test_what_a_broker_says_about_the_request_is_the_askers(town: Town) -> None:
    town.brokers, town.outcomes = {"a:1": "A"}, {"A": [ProtocolError("no")]}
    with pytest.raises(ProtocolError):
        await pool("a:1").call(TOPIC, r.Named("t"))
    assert town.who == ["A"]


async def test_a_list_that_changes_while_we_connect_does_no_harm(town: Town) -> None:
    town.brokers = {"a:1": "A", "b:1": "B", "c:1": "C"}
    asked = pool("a:1")
    await asked.open()
    key = next(f"{i}" for i in range(999) if first_for(f"{i}", "A", "B", "C") == ["C", "B", "A"])
    town.brokers["c:1"] = BrokerUnavailable("it has just gone")

    def learn(address: str) -> None:
        asked._known = {"A": BrokerInfo("A", "a:1")}

    town.on_connect = learn
    assert await asked.call(TOPIC, r.Named("t"), key=key) == "B"


# ---- brokers that cannot be used ----


@pytest.mark.parametrize("error", [ProtocolError("another version"), NotAuthenticated("nobody knows it")])
async def test_one_that_does_not_take_us_is_passed_over(town: Town, error: PostroomError) -> None:
    town.brokers = {"a:1": "A", "b:1": "B"}
    asked = pool("a:1", "b:1")
    await asked.open()
    town.brokers["b:1"] = error
    assert {await asked.call(TOPIC, r.Named("t"), key=f"{i}") for i in range(20)} == {"A"}
    town.brokers["a:1"] = error
    asked = pool("c:1", "a:1", "b:1")
    with pytest.raises(type(error), match=str(error)):  # and not that there is nobody at c:1
        await asked.open()


async def test_however_many_ask_a_broker_is_tried_once(town: Town) -> None:
    town.brokers = {"a:1": "A", "b:1": "B"}
    asked = pool("a:1")
    await asked.open()
    town.brokers["b:1"] = BrokerUnavailable("down")
    calls = (asked.call(TOPIC, r.Named("t"), key=f"p{i}") for i in range(50))
    assert set(await asyncio.gather(*calls)) == {"A"}
    assert town.connected.count("b:1") == 1
    until, tries = asked._away["b:1"]
    assert tries == 1
    assert until - asyncio.get_running_loop().time() < 1


async def test_nobody_waits_for_a_broker_that_fell_silent(town: Town) -> None:
    town.brokers = {"a:1": "A", "b:1": "B"}
    asked = pool("a:1")
    await asked.open()
    key = next(f"{i}" for i in range(99) if first_for(f"{i}", "A", "B")[0] == "B")
    assert await asked.call(TOPIC, r.Named("t"), key=key) == "B"
    town.outcomes["B"] = [SILENT]
    assert await asked.call(TOPIC, r.Named("t"), key=key) == "A"
    assert town.connected == ["a:1", "b:1"]
    asked._away["b:1"] = (0.0, 1)  # it was left alone for long enough
    assert await asked.call(TOPIC, r.Named("t"), key=key) == "A"
    await asyncio.gather(*asked._opening.values())
    assert town.connected == ["a:1", "b:1", "b:1"]  # it was looked for meanwhile
    assert await asked.call(TOPIC, r.Named("t"), key=key) == "B"


async def test_the_only_broker_is_tried_however_often_it_was_not_there(town: Town) -> None:
    asked = pool("a:1")
    for _ in range(5):
        with pytest.raises(BrokerUnavailable, match="nobody at a:1"):
            await asked.call(TOPIC, r.Named("t"))
    town.brokers = {"a:1": "A"}
    assert await asked.call(TOPIC, r.Named("t")) == "A"


SEND = OPERATIONS["append"], r.Append("t", 1), (b"batch",)


async def test_whoever_does_not_wait_asks_the_preferred_broker_if_it_is_connected(town: Town) -> None:
    town.brokers = {"a:1": "A", "b:1": "B"}
    asked = pool("a:1")
    told = list[Any]()
    assert not asked.call_soon(*SEND, told.append, key="p1")  # nobody is
    await asked.open()
    keys = {first_for(f"p{i}", "A", "B")[0]: f"p{i}" for i in range(99)}
    assert asked.call_soon(*SEND, told.append, key=keys["A"])
    assert not asked.call_soon(*SEND, told.append, key=keys["B"])  # `call` connects
    await asked.call(TOPIC, r.Named("t"), key=keys["B"])
    assert asked.call_soon(*SEND, told.append, key=keys["B"])
    assert town.who == ["A", "B", "B"]
    cast(Pretended, asked._links["B"]).told[0]("stored")
    assert told == ["stored"]
    cast(Pretended, asked._links["A"]).takes = False
    assert not asked.call_soon(*SEND, told.append, key=keys["A"])
    asked._links["B"].gone = True  # type: ignore[misc]
    assert not asked.call_soon(*SEND, told.append, key=keys["B"])
    await asked.close()
    assert not asked.call_soon(*SEND, told.append, key=keys["A"])


@pytest.mark.parametrize("outcome", [LOST, SILENT, STOPPING], ids=["lost", "silent", "stopping"])
async def test_whoever_does_not_wait_is_told_whether_it_may_be_stored(town: Town, outcome: Exception) -> None:
    town.brokers = {"a:1": "A"}
    asked, told = pool("a:1"), list[Any]()
    await asked.open()
    asked.call_soon(*SEND, told.append, key="p1")
    link = cast(Pretended, asked._links["A"])
    link.silent = outcome is SILENT
    link.told[0](outcome)
    (error,) = told
    assert isinstance(error, BrokerUnavailable) and error.retriable
    assert error.details.get("stored") is (False if outcome is STOPPING else None)
    assert ("a:1" in asked._away) is (outcome is SILENT)


async def test_one_broker_under_two_addresses_is_one(town: Town) -> None:
    town.brokers = {"a:1": "A", "127.0.0.1:1": "A"}
    asked = pool("a:1", "127.0.0.1:1")
    await asked.open()
    await asked._open("127.0.0.1:1")
    assert len(asked._links) == 1


async def test_a_closed_pool_says_so(town: Town) -> None:
    town.brokers = {"a:1": "A"}
    asked = pool("a:1")
    await asked.open()
    opening = asyncio.ensure_future(pool("z:1").open())
    await asked.close()
    with pytest.raises(BrokerUnavailable, match="this connection is closed"):
        await asked.call(TOPIC, r.Named("t"))
    with pytest.raises(BrokerUnavailable):
        await opening
