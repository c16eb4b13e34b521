"""Who is let in, for how long an answer holds, and what each method of the endpoint asks for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from postroom.broker.access import Gatekeeper, new_token
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.endpoint.operations import OPERATIONS
from postroom.errors import (
    NotAuthenticated,
    PermissionDenied,
    StoreUnavailable,
    UnknownPartition,
    UnknownTopic,
)
from postroom.model.access import ALL, ANONYMOUS, Principal, hash_of, is_token, parse_permissions
from postroom.model.policy.settings import TopicSettings
from postroom.store import open_memory
from postroom.store.contract import Store

TOKEN = "pst_" + "T" * 43


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    store = open_memory(clock)
    store.access.add(Principal("shop", parse_permissions(["send:orders"])), hash_of(TOKEN))
    yield store
    store.close()


class Desk:
    """A gatekeeper, what it asked the store, and how long it slept."""

    def __init__(self, store: Store, clock: ManualClock, *, dev: bool = False) -> None:
        self.asked: list[str] = []
        self.slept: list[float] = []
        self.away = False
        self.keeper = Gatekeeper(store, self._in_thread, clock, dev=dev, sleep=self._sleep)  # type: ignore[arg-type]

    async def enter(
        self, token: str | None = None, *, loopback: bool = True, certificate: str | None = None
    ) -> Principal:
        return await self.keeper.authenticate(token, peer_is_loopback=loopback, certificate_name=certificate)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        self.asked.append(function.__name__)
        if self.away:
            raise StoreUnavailable("away")
        return await asyncio.to_thread(function, *args)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def desk(store: Store, clock: ManualClock) -> Desk:
    return Desk(store, clock)


# ---- who ----


async def test_a_token_names_its_principal(desk: Desk) -> None:
    assert (await desk.enter(TOKEN, loopback=False)).name == "shop"


@pytest.mark.parametrize("token", ["pst_" + "t" * 43, "x", TOKEN + "x", TOKEN[:-1], "pst_é", "\ud800"])
async def test_a_wrong_token(desk: Desk, token: str) -> None:
    with pytest.raises(NotAuthenticated, match="invalid token") as caught:
        await desk.enter(token)
    assert token == "x" or token not in str(caught.value)


async def test_what_does_not_look_like_a_token_is_not_asked_for(desk: Desk) -> None:
    for token in ("x", "pst_", TOKEN + "x"):
        with pytest.raises(NotAuthenticated):
            await desk.enter(token)
    assert desk.asked == []


async def test_nobody_comes_without_a_token(desk: Desk) -> None:
    for token in (None, ""):
        with pytest.raises(NotAuthenticated, match="POSTROOM_TOKEN"):
            await desk.enter(token)


async def test_dev_is_anonymous_from_this_machine_only(store: Store, clock: ManualClock) -> None:
    desk = Desk(store, clock, dev=True)
    assert await desk.enter() is ANONYMOUS
    assert await desk.keeper.current(ANONYMOUS) is ANONYMOUS
    with pytest.raises(NotAuthenticated):
        await desk.enter(loopback=False)
    with pytest.raises(NotAuthenticated):
        await desk.enter("pst_" + "w" * 43)  # who shows a token means it
    assert (await desk.enter(TOKEN)).name == "shop"


async def test_a_certificate_names_its_principal(desk: Desk) -> None:
    assert (await desk.enter(certificate="shop", loopback=False)).name == "shop"
    with pytest.raises(NotAuthenticated, match="postroom access add mallory --no-token"):
        await desk.enter(certificate="mallory")
    with pytest.raises(NotAuthenticated):
        await desk.enter(certificate="anonymous")
    with pytest.raises(NotAuthenticated):
        await desk.enter(certificate="a\0b")


async def test_a_token_counts_before_a_certificate(desk: Desk, store: Store) -> None:
    store.access.add(Principal("audit", ALL), "")
    assert (await desk.enter(TOKEN, certificate="audit")).name == "shop"
    with pytest.raises(NotAuthenticated):
        await desk.enter("pst_" + "w" * 43, certificate="audit")


# ---- how long an answer holds ----


async def test_an_answer_is_remembered_for_a_while(desk: Desk, store: Store, clock: ManualClock) -> None:
    principal = await desk.enter(TOKEN)
    store.access.remove("shop")
    clock.advance(DEFAULTS.access_fresh_ms / 1000 - 0.001)
    assert await desk.enter(TOKEN) == await desk.keeper.current(principal) == principal
    assert desk.asked == ["by_secret"]
    clock.advance(0.001)
    with pytest.raises(NotAuthenticated, match="was removed"):
        await desk.keeper.current(principal)
    with pytest.raises(NotAuthenticated):
        await desk.enter(TOKEN)


async def test_a_clock_that_goes_back_makes_no_answer_last(desk: Desk, clock: ManualClock) -> None:
    await desk.enter(TOKEN)
    clock._now_ms -= 3_600_000
    await desk.enter(TOKEN)
    assert desk.asked == ["by_secret"] * 2


async def test_a_rotated_token_ends_and_permissions_change(
    desk: Desk, store: Store, clock: ManualClock
) -> None:
    principal = await desk.enter(TOKEN)
    store.access.permit("shop", parse_permissions(["consume:orders"]), ())
    clock.advance(DEFAULTS.access_fresh_ms / 1000)
    changed = await desk.keeper.current(principal)
    assert [str(permission) for permission in changed.permissions] == ["send:orders", "consume:orders"]
    store.access.put(changed, hash_of(new_token()))
    clock.advance(DEFAULTS.access_fresh_ms / 1000)
    with pytest.raises(NotAuthenticated):
        await desk.keeper.current(changed)


async def test_who_came_with_a_certificate_outlives_the_token(
    desk: Desk, store: Store, clock: ManualClock
) -> None:
    principal = await desk.enter(certificate="shop")
    store.access.put(principal, hash_of(new_token()))
    clock.advance(DEFAULTS.access_fresh_ms / 1000)
    assert (await desk.keeper.current(principal)).name == "shop"
    store.access.remove("shop")
    clock.advance(DEFAULTS.access_fresh_ms / 1000)
    with pytest.raises(NotAuthenticated):
        await desk.keeper.current(principal)


async def test_many_who_ask_at_once_are_one_question(desk: Desk) -> None:
    found = await asyncio.gather(*(desk.enter(TOKEN) for _ in range(50)))
    assert {principal.name for principal in found} == {"shop"} and desk.asked == ["by_secret"]


async def test_one_who_gives_up_does_not_take_the_answer_from_others(desk: Desk) -> None:
    first = asyncio.create_task(desk.enter(TOKEN))
    second = asyncio.create_task(desk.enter(TOKEN))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).name == "shop"


async def test_a_wrong_token_is_not_remembered(desk: Desk, store: Store) -> None:
    token = new_token()
    with pytest.raises(NotAuthenticated):
        await desk.enter(token)
    store.access.add(Principal("new", ALL), hash_of(token))
    assert (await desk.enter(token)).name == "new"


async def test_while_the_store_is_away_who_is_known_stays(desk: Desk, clock: ManualClock) -> None:
    principal = await desk.enter(TOKEN)
    desk.away = True
    clock.advance(3600)
    assert await desk.keeper.current(principal) == principal
    assert await desk.enter(TOKEN) == principal
    with pytest.raises(StoreUnavailable):
        await desk.enter(new_token())


async def test_whoever_guesses_waits(desk: Desk, clock: ManualClock) -> None:
    async def guess() -> None:
        with pytest.raises(NotAuthenticated):
            await desk.enter(new_token())

    for _ in range(10):
        await guess()
    assert desk.slept == []
    await guess()
    await guess()
    assert desk.slept == [1.0, 1.0]
    assert (await desk.enter(TOKEN)).name == "shop" and len(desk.slept) == 2
    clock.advance(1)
    await guess()
    assert len(desk.slept) == 2


# ---- what ----


def test_what_changes_or_destroys_needs_manage() -> None:
    harmless = {"send", "consume", "any", "none"}
    needs = {name: one.need for name, one in OPERATIONS.items() if one.need in harmless}
    assert set(needs) == {
        *("topics", "topic", "route", "route_history", "route_change", "groups", "lag"),
        *("append", "cancel", "fetch", "resolve", "bounds", "subscribe", "unsubscribe", "poll", "settle"),
        *("hand_over", "unpark", "settle_and_poll", "delayed"),
        *("beat", "dead_letters", "redrive", "lanes", "report_sources"),
        *("stopped", "restart_stopped", "skip_stopped", "drop_stopped"),  # who consumes could ack it as well
        *("open_replies", "close_replies"),
        *("stage", "staged_marks", "decide_staged", "publish_staged", "drop_staged"),
    }
    assert {name for name, need in needs.items() if need == "none"} == {"topics"}


@pytest.mark.parametrize(
    ("method", "topic", "grant"),
    [
        ("poll", "orders", "consume:orders"),
        ("append", "invoices", "send:invoices"),
        ("append", "orders.billing.dead", "manage:orders"),
        ("dead_letters", "orders.billing.dead", "consume:orders"),
        ("topic", "invoices", "send:invoices"),
        ("shards", None, "manage:*"),
        ("decide_staged", None, "send:*"),
    ],
)
async def test_what_is_refused_names_the_grant(
    desk: Desk, method: str, topic: str | None, grant: str, store: Store, clock: ManualClock
) -> None:
    principal = await desk.enter(TOKEN)
    with pytest.raises(PermissionDenied, match=r"principal 'shop' .*: `postroom access grant shop") as caught:
        desk.keeper.check(principal, OPERATIONS[method].need, topic)
    assert caught.value.details == {"principal": "shop", "permission": grant}
    assert f"grant shop {grant}`" in str(caught.value)
    changed = store.access.permit("shop", parse_permissions([grant]), ())  # and that is what it takes
    desk.keeper.check(changed, OPERATIONS[method].need, topic)


async def test_what_is_allowed(desk: Desk) -> None:
    principal = await desk.enter(TOKEN)
    for method in ("append", "cancel", "topic", "route", "lag"):
        desk.keeper.check(principal, OPERATIONS[method].need, "orders")
    assert desk.keeper.visible(principal, ["orders", "invoices"]) == {"orders"}


async def test_a_partition_belongs_to_the_topic_that_is_named(desk: Desk, store: Store) -> None:
    """Else whoever may send to one topic could send to any, by the id of its partition."""
    ours = store.catalog.create_topic("orders", TopicSettings(), 1).route.ranges[0].partition_id
    theirs = store.catalog.create_topic("secret", TopicSettings(), 1).route.ranges[0].partition_id
    await desk.keeper.check_partition("orders", ours)
    asked = len(desk.asked)
    await desk.keeper.check_partition("orders", ours)
    assert len(desk.asked) == asked
    for _ in range(2):
        with pytest.raises(UnknownPartition, match="not a partition of topic 'orders'"):
            await desk.keeper.check_partition("orders", theirs)
        await desk.keeper.check_partition("secret", theirs)
    with pytest.raises(UnknownTopic):
        await desk.keeper.check_partition("nothing", 99)


# ---- secrets ----


def test_tokens_are_random_and_recognised() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100 and all(map(is_token, tokens))


async def test_no_token_is_logged_or_shown(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = [new_token() for _ in range(12)]
    shown = ""
    for token in wrong:
        with pytest.raises(NotAuthenticated) as caught:
            await desk.enter(token)
        shown += f"{caught.value!r} {caught.value.details}"
    principal = await desk.enter(TOKEN)
    shown += repr(principal) + repr(vars(desk.keeper)) + caplog.text
    assert "answered slowly" in caplog.text
    assert not any(token[4:] in shown for token in (*wrong, TOKEN))


def test_a_refusal_does_not_repeat_a_long_name(desk: Desk) -> None:
    """Three times a name of 15 MB was 45 MB of an answer."""
    stranger = Principal("nobody", ())
    for need in ("send", "any", "manage"):
        with pytest.raises(PermissionDenied) as caught:
            desk.keeper.check(stranger, need, "x" * 10**6)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 1000
        assert len(caught.value.details["permission"]) < 200
    with pytest.raises(PermissionDenied, match=f"grant nobody send:{'x' * 120}` allows"):
        desk.keeper.check(stranger, "send", "x" * 120)
