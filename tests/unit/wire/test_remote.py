"""The remote endpoint, over a pool that only remembers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from postroom.client.codec import due_at
from postroom.endpoint.requests import Poll
from postroom.endpoint.values import Grant, Lease, PollReply, PollRequest, Settle, SettleReply, Verdict
from postroom.errors import BrokerUnavailable, InvalidSetting
from postroom.wire.client.remote import RemoteEndpoint

REQUEST = PollRequest("t", "g", "m", 7, 10, 1000, 0, True)


class Pool:
    """`repeats`: whether the answer to the first attempt is lost."""

    def __init__(self, *answers: Any, repeats: bool = False) -> None:
        self.answers, self.repeats = list(answers), repeats
        self.asked: list[tuple[str, Any, str]] = []

    async def call(
        self, operation: Any, request: Any, body: Any = (), *, key: str = "", again: Any = None
    ) -> Any:
        self.asked.append((operation.name, request, key))
        if self.repeats and again is not None:
            self.asked.append((operation.name, again(), key))
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


async def endpoint(pool: Pool) -> RemoteEndpoint:
    made = RemoteEndpoint(("a:1",), client="c", token="", tls=None, zone="", clock=None)
    made.pool = pool  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("wrong", ["0", 1.5, None, object(), 2**63, [1]])
async def test_what_a_broker_could_not_read_is_not_asked(wrong: Any) -> None:
    pool = Pool()
    with pytest.raises(InvalidSetting, match=r"split\(topic='t', partition=.*is not what it should be"):
        await (await endpoint(pool)).split("t", wrong, None)
    assert pool.asked == []


async def test_a_repeated_poll_says_so() -> None:
    pool = Pool(PollReply((), 1), repeats=True)
    await (await endpoint(pool)).poll(REQUEST)
    assert [request.request.repeated for _, request, _ in pool.asked] == [False, True]


async def test_settling_goes_where_the_group_was_polled_until_it_is_left() -> None:
    pool = Pool(PollReply((), 1), SettleReply(), None, SettleReply())
    remote = await endpoint(pool)
    await remote.poll(REQUEST)
    await remote.settle("t", "g", [])
    await remote.unsubscribe("t", "g", "m")
    await remote.settle("t", "g", [])
    assert [key for name, _, key in pool.asked if name == "settle"] == ["mm", ""]
    assert remote._polls_at == {}


def part(*verdicts: Verdict) -> Settle:
    return Settle("t", 1, 7, verdicts)


@pytest.mark.parametrize("repeats", [True, False])
async def test_of_a_repeated_verdict_only_acks_can_be_lost(repeats: bool) -> None:
    acked, retried = part(Verdict("ack", 0, 4)), part(Verdict("retry", 5, 9), Verdict("release", 10, 10))
    both = part(Verdict("ack", 0, 4), Verdict("retry", 5, 9))
    lost = ((acked, ((0, 1),)), (retried, ((5, 10),)), (both, ((7, 7),)))
    pool = Pool(SettleReply(lost=lost), repeats=repeats)
    reply = await (await endpoint(pool)).settle("t", "g", [acked, retried, both])
    assert reply.lost == (lost[:1] if repeats else lost)


# ---- what a cancelled poll was given ----


def grant(partition_id: int, *, position: int = -1) -> Grant:
    return Grant("t", 0, partition_id, (Lease(0, 4, 1, False), Lease(9, 9, 2, True)), (), position)


async def given_back(request: PollRequest, *grants: Grant, answer: Any = None) -> list[tuple[str, Any, str]]:
    pool = Pool(answer)
    remote = await endpoint(pool)
    remote._came_late(Poll(request), PollReply(grants, 1000))
    for task in list(remote._background):
        await task
    return pool.asked


async def test_deliveries_are_released() -> None:
    ((name, request, _),) = await given_back(REQUEST, grant(1), answer=SettleReply())
    assert name == "settle"
    assert request.parts == (part(Verdict("release", 0, 4), Verdict("release", 9, 9)),)


async def test_partitions_of_ordered_groups_are_handed_over_if_they_are_new() -> None:
    held = PollRequest("t", "g", "m", 7, 10, 1000, 0, True, positions=((1, 50),))
    ((name, request, _),) = await given_back(held, grant(1, position=55), grant(2, position=10))
    assert (name, request.token, tuple(request.partition_ids)) == ("hand_over", 7, (2,))


async def test_nothing_is_nothing_to_give_back() -> None:
    assert await given_back(REQUEST) == []
    on_delivery = PollRequest("t", "g", "m", 7, 10, 1000, 0, True, on_delivery=True)
    assert await given_back(on_delivery, grant(1)) == []


async def test_what_cannot_be_given_back_waits_for_its_lease(caplog: pytest.LogCaptureFixture) -> None:
    await given_back(REQUEST, grant(1), answer=BrokerUnavailable("nobody"))
    assert "waits for its lease to end: nobody" in caplog.text


async def test_a_broker_is_never_taken_to_be_behind_its_clock() -> None:
    """What a client delays by its broker's clock does not come early, however slow the answer (R35)."""
    remote, now = await endpoint(Pool()), asyncio.get_running_loop().time()
    remote._time_told(1_000_000, now - 2)
    assert 1_002_000 <= remote.now_ms() < 1_010_000
    remote._time_told(1_002_000, asyncio.get_running_loop().time())
    assert 1_002_000 <= remote.now_ms() < 1_010_000


async def test_a_moment_that_may_not_have_come_is_no_moment_that_has_passed() -> None:
    """The answer was long under way: the broker's clock may be anywhere between (R35)."""
    remote, now = await endpoint(Pool()), asyncio.get_running_loop().time()
    remote._time_told(1_000_000, now - 2)
    assert 1_000_000 <= remote.reached_ms() < 1_001_000
    assert due_at(None, 1_000 + 1.5, remote.now_ms(), remote.reached_ms()) == 1_001_500
    assert due_at(None, 999.9, remote.now_ms(), remote.reached_ms()) == 0


async def test_a_lease_is_not_longer_than_it_was_granted_once_the_time_is_known_better() -> None:
    """What was told first was 2 s under way, what comes next is quick: time goes on meanwhile, and not back
    (I16). By `now_ms` a lease that began between the two would last up to 2 s too long here."""
    remote, now = await endpoint(Pool()), asyncio.get_running_loop().time()
    remote._time_told(1_000_000, now - 2)
    began, latest = remote.reached_ms(), remote.now_ms()
    remote._time_told(1_000_500, asyncio.get_running_loop().time())
    assert remote.reached_ms() >= began + 500
    assert remote.now_ms() < latest  # of which a lease cannot be made
