"""Heartbeats while the loop turns, is blocked, and is blocked right after it took one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from postroom.endpoint.requests import Beats
from postroom.errors import BrokerUnavailable
from postroom.wire.client import remote
from postroom.wire.client.remote import Beater
from postroom.wire.messages import Hello
from tests.tuned import tuned

BEATS, HELLO = Beats(()), Hello(1, 1, "test")
QUICK = tuned(wire={"beat_taken_s": 0.1}).tuning.wire


class Own:
    """A connection of the heartbeat's own, that answers as it was told."""

    made: list[str]
    outcomes: dict[str, list[Exception]]

    def __init__(self, address: str, hello: Any, tls: Any, answer_s: float) -> None:
        Own.made.append(address)
        self.address = address
        self.closed = False
        if Own.outcomes.get(f"connect {address}"):
            raise Own.outcomes[f"connect {address}"].pop(0)

    def call(self, beats: Beats) -> str:
        if Own.outcomes.get(self.address):
            raise Own.outcomes[self.address].pop(0)
        return f"own {self.address}"

    def close(self) -> None:
        self.closed = True


class Looped:
    """A loop in a thread that can be blocked."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.free, self.blocked = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.taken = 0
        self.answer: Any = "through the loop"
        self.block_when_taken = False

    def _block(self) -> None:
        self.blocked.set()
        self.free.wait(20)

    def block(self) -> None:
        self.loop.call_soon_threadsafe(self._block)
        assert self.blocked.wait(20)

    async def through_loop(self, beats: Beats) -> Any:
        self.taken += 1
        if self.block_when_taken:
            self.loop.call_soon(self._block)
        await asyncio.sleep(0.05)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.free.set()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), self.loop).result(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looped]:
    Own.made, Own.outcomes = [], {}
    monkeypatch.setattr(remote, "_BlockingLink", Own)
    looped = Looped()
    yield looped
    looped.close()


def beater(looped: Looped, *addresses: str) -> Beater:
    return Beater(looped.loop, looped.through_loop, lambda: addresses or ("a",), HELLO, None, QUICK)


def test_while_the_loop_turns_it_takes_the_beat(looped: Looped) -> None:
    assert beater(looped).beat(BEATS) == "through the loop"
    assert Own.made == []


def test_what_the_broker_says_is_raised(looped: Looped) -> None:
    looped.answer = BrokerUnavailable("nobody")
    with pytest.raises(BrokerUnavailable):
        beater(looped).beat(BEATS)


def test_a_blocked_loop_is_gone_round(looped: Looped) -> None:
    looped.block()
    one = beater(looped)
    assert [one.beat(BEATS), one.beat(BEATS)] == ["own a", "own a"]
    assert Own.made == ["a"]  # the second went the same way
    assert not looped.free.is_set()


def test_a_loop_that_is_blocked_after_it_took_the_beat_is_gone_round(looped: Looped) -> None:
    looped.block_when_taken = True
    assert beater(looped).beat(BEATS) == "own a"
    assert looped.taken == 1
    assert not looped.free.is_set()  # it is blocked still


def test_once_the_loop_turns_again_the_own_connection_is_closed(looped: Looped) -> None:
    looped.block()
    one = beater(looped)
    one.beat(BEATS)
    own = one._own
    assert isinstance(own, Own)
    looped.free.set()
    assert one.beat(BEATS) == "through the loop"
    assert own.closed
    assert one._own is None


@pytest.mark.parametrize("error", [OSError("reset"), EOFError(), BrokerUnavailable("it is stopping")])
def test_the_next_broker_is_asked_if_one_is_gone(looped: Looped, error: Exception) -> None:
    looped.block()
    one = beater(looped, "a", "b")
    assert one.beat(BEATS) == "own a"
    Own.outcomes = {"a": [error], "connect a": [ConnectionRefusedError()]}
    assert one.beat(BEATS) == "own b"
    assert Own.made == ["a", "a", "b"]


def test_nobody_there_is_said(looped: Looped) -> None:
    looped.block()
    Own.outcomes = {"connect a": [ConnectionRefusedError("refused")]}
    with pytest.raises(BrokerUnavailable, match="no broker could be reached for a heartbeat"):
        beater(looped).beat(BEATS)


def test_a_closed_loop_is_said() -> None:
    loop = asyncio.new_event_loop()
    loop.close()

    async def never(beats: Beats) -> None: ...

    with pytest.raises(BrokerUnavailable, match="the event loop of this connection is closed"):
        Beater(loop, never, lambda: ("a",), HELLO, None).beat(BEATS)
