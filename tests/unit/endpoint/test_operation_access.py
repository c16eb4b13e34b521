"""Which principal may ask what, at both doors: every operation × permission × wire and HTTP (R48).

The answers are recorded in `recorded/operation_access.txt`. Whoever changes them on purpose records them anew
with `python -m tests.unit.endpoint.test_operation_access`, and explains every line of the difference in the
commit.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from postroom.address import parse
from postroom.broker.access import Gatekeeper
from postroom.broker.broker import Broker, open_endpoint
from postroom.clock import SystemClock
from postroom.endpoint.operations import OPERATIONS
from postroom.endpoint.values import Beat, Held, PollRequest, Settle, UnparkRequest
from postroom.errors import PermissionDenied, PostroomError
from postroom.http.access import Permitted
from postroom.model.access import ANONYMOUS, Principal, parse_permissions
from postroom.model.messages.batch import BatchBuilder
from postroom.model.moves.staging import Wish
from postroom.model.policy.rate import group_rate, producer_rate, topic_rate
from postroom.model.policy.settings import GroupWish, Start, TopicSettings
from postroom.model.topology.names import reply_topic
from postroom.wire import messages as m
from postroom.wire.server.answers import Answers
from postroom.wire.server.listening import Listening
from postroom.wire.server.session import Session
from tests.unit.http.http_client import API, staged

RECORDED = Path(__file__).parent / "recorded" / "operation_access.txt"

NAME = "shop"
PERMISSIONS = {
    "nothing": (),
    **{f"{action}:{pattern}": (f"{action}:{pattern}",)
       for action in ("send", "consume", "manage") for pattern in ("orders", "secrets", "*", "_*")},
    **{f"{action} both": (f"{action}:orders", f"{action}:secrets")
       for action in ("send", "consume", "manage")},
}  # fmt: skip
PRINCIPALS = {
    **{shown: Principal(NAME, parse_permissions(texts)) for shown, texts in PERMISSIONS.items()},
    "anonymous": ANONYMOUS,
}
TOPICS = ("orders", "orders.billing.dead", reply_topic("c", NAME), reply_topic("c", "other"))
TOLD = ("owner", "producer", "viewer")  # what a door adds to a call
BODIES = {"append": "batch", "stage": "data"}


# ---- what is asked ----


class Call(NamedTuple):
    operation: str
    about: str
    arguments: dict[str, Any]
    alone: bool = True  # about one topic: the grant that is missing is always the same


def batch_of(value: bytes) -> bytes:
    builder = BatchBuilder()
    builder.append(0, None, value, [])
    return builder.build()


def of_topic(topic: str, partition_id: int) -> dict[str, dict[str, Any]]:
    """The operations that are about one topic, which they name in one way or the other."""
    named, here = {"name": topic}, {"topic": topic}
    group = {**here, "name": "billing"}
    member = {**here, "group": "billing"}
    spots = {**member, "spots": None}
    poll = PollRequest(topic, "billing", "m", 1, 1, 1, 0, True)
    parked = UnparkRequest(topic, "billing", "m", 1, partition_id, 1, b"k", 1, 2, 1, 1)
    return {
        "create_topic": {**named, "settings": TopicSettings(), "partitions": 1, "exist_ok": True},
        "topic": named, "delete_topic": named, "purge": named,
        "alter_topic": {**named, "settings": TopicSettings()},
        "route": here, "route_history": here, "route_change": here, "groups": here,
        "bounds": {**here, "at": ()},
        "split": {**here, "partition": 0, "at": None}, "merge": {**here, "one": 0, "other": 1},
        "move": {**here, "partition": 0, "shard": None}, "cancel": {**here, "id": "1"},
        "delayed": {**here, "limit": 1, "since": None},
        "append": {**here, "partition_id": partition_id, "batch": batch_of(b"1")},
        "fetch": {**here, "partition_id": partition_id, "offset": 0, "max_messages": 1, "max_bytes": 1,
                  "wait_ms": 0},
        "resolve": {**here, "start": Start()},
        "create_group": {**group, "wish": GroupWish()}, "alter_group": {**group, "wish": GroupWish()},
        "pause": {**group, "paused": True}, "delete_group": {**group, "force": True},
        "reset": {**group, "start": Start(), "force": False, "dry_run": True},
        "convert_group": {**group, "mode": "kafka", "force": False, "dry_run": True},
        "lag": member, "lanes": member, "report_sources": {**member, "seen": (), "version": 0},
        "subscribe": {**member, "wish": GroupWish(), "member": "m", "client": "c", "named": True},
        "unsubscribe": {**member, "member": "m"}, "hand_over": {**member, "token": 1, "partition_ids": (1,)},
        "poll": {"request": poll}, "unpark": {"request": parked},
        "settle": {**member, "parts": (Settle(topic, partition_id, 1, ()),)},
        "beat": {"beats": (Beat(topic, "billing", "m", "c", (Held(topic, partition_id, 1, ((0, 0),)),)),)},
        "dead_letters": {**member, "limit": 1, "after": None}, "redrive": spots, "discard": spots,
        "stopped": {**member, "limit": 1, "after": None, "behind": True},
        "restart_stopped": spots, "skip_stopped": spots, "drop_stopped": spots,
        "stage": {**here, "query": "q", "batch": 0, "segment": "s", "number": 0,
                  "partition_ids": (partition_id,), "data": batch_of(b"1")},
        "set_rate": {"rate": topic_rate(topic, 1)},
    }  # fmt: skip


def calls(partitions: dict[str, int]) -> Iterator[Call]:
    for topic in TOPICS:
        for operation, arguments in of_topic(topic, partitions.get(topic, 1)).items():
            yield Call(operation, topic, arguments)
    for operation in ("topics", "shards", "rates", "principals"):
        yield Call(operation, "the queue", {})
    yield Call("audit_log", "the queue", {"limit": 1})
    yield Call("audit_log", "a topic", {"limit": 1, "topic": "orders"})
    for operation in ("drain_shard", "open_shard"):
        yield Call(operation, "a shard called orders", {"name": "orders"})
    yield Call("set_rate", "a group", {"rate": group_rate("orders", "billing", 1)})
    yield Call("set_rate", "a producer", {"rate": producer_rate("other", 1)})
    for client in ("c", "orders"):
        for operation in ("open_replies", "close_replies"):
            yield Call(operation, f"client {client}", {"client": client})
    for topics in ((), ("orders",), ("orders", "secrets")):
        named = {"topics": topics, "query": "q"}
        about, alone = f"topics {topics}", len(topics) < 2
        yield Call("staged_marks", about, named, alone)
        yield Call("decide_staged", about, {**named, "batch": 0, "wish": Wish()}, alone)
        yield Call("publish_staged", about, {**named, "batch": 0}, alone)
        yield Call("drop_staged", about, {**named, "batch": 0, "segments": None}, alone)
    part = Settle("secrets", partitions["secrets"], 1, ())
    held = Held("secrets", partitions["secrets"], 1, ((0, 0),))
    beat = Beat("orders", "billing", "m", "c", (held,))
    yield Call("settle", "nothing of orders", {"topic": "orders", "group": "billing", "parts": ()})
    mixed = {"topic": "orders", "group": "billing", "parts": (part,)}
    yield Call("settle", "secrets within orders", mixed, alone=False)
    yield Call("beat", "secrets within orders", {"beats": (beat,)}, alone=False)
    astray = Settle("orders", partitions["secrets"], 1, ())
    yield Call("settle", "a partition of secrets as if of orders", {**mixed, "parts": (astray,)})
    others = of_topic("orders", partitions["secrets"])
    for operation in ("append", "fetch"):
        yield Call(operation, "a partition of secrets as if of orders", others[operation])


# ---- who answers ----


class Reached(BaseException):
    """The call was let through, with what the door added."""


class Listener:
    """Stands behind both doors in place of a broker: whatever is let through is told."""

    def __init__(self, broker: Broker) -> None:
        self.store, self.in_thread, self.now_ms = broker.store, broker.in_thread, broker.now_ms
        self.reached_ms = broker.reached_ms

    def beat(self, beats: Any) -> Any:
        raise Reached("reached")

    def __getattr__(self, name: str) -> Any:
        async def verb(*args: Any, **named: Any) -> Any:
            told = {one: named[one] for one in TOLD if named.get(one)}
            shown = " ".join(f"{one}={getattr(value, 'name', value)}" for one, value in told.items())
            raise Reached(f"reached {shown}".rstrip())

        return verb


async def over_wire(broker: Any, gatekeeper: Gatekeeper, principal: Principal, call: Call) -> None:
    limits = Listening()
    share = Answers(limits.all_answer_bytes, limits.answer_bytes, limits.answer_wait_ms).share(NAME)
    session = Session(broker, gatekeeper, principal, "c", share, limits)
    operation = OPERATIONS[call.operation]
    arguments = dict(call.arguments)
    body = arguments.pop(BODIES.get(call.operation, ""), b"")
    request = m.decode(m.encode_header(operation.request(**arguments)), operation.request)
    await session.call(operation, request, body)


async def over_http(broker: Any, gatekeeper: Gatekeeper, principal: Principal, call: Call) -> None:
    permitted = Permitted(broker, gatekeeper, principal)
    answer = getattr(permitted, call.operation)(**call.arguments)
    await answer


class KnownGatekeeper(Gatekeeper):
    """The principals of this test are in no store."""

    async def current(self, principal: Principal) -> Principal:
        return principal


DOORS = {"wire": over_wire, "http": over_http}


async def answer_to(door: str, broker: Any, gatekeeper: Gatekeeper, principal: Principal, call: Call) -> str:
    try:
        await DOORS[door](broker, gatekeeper, principal, call)
    except Reached as reached:
        return str(reached)
    except PermissionDenied as error:
        return f"needs {error.details['permission']}" if call.alone else "denied"
    except PostroomError as error:
        return type(error).__name__
    raise AssertionError(f"{call.operation} was neither done nor refused")


async def found() -> list[str]:
    broker = await open_endpoint(parse("memory://"))
    lines: list[str] = []
    try:
        partitions = {}
        for topic in ("orders", "secrets"):
            await broker.create_topic(topic, TopicSettings(), 1, False)
            partitions[topic] = (await broker.route(topic)).ranges[0].partition_id
        gatekeeper = KnownGatekeeper(broker.store, broker.in_thread, SystemClock())
        listener = cast(Any, Listener(broker))
        for call in sorted(calls(partitions), key=lambda one: (one.operation, one.about)):
            by_door = {}
            for door in DOORS:
                answers = {
                    shown: await answer_to(door, listener, gatekeeper, principal, call)
                    for shown, principal in PRINCIPALS.items()
                }
                by_door[door] = lines_of(answers)
            same = by_door["wire"] == by_door["http"]
            for door in ("both",) if same else DOORS:
                shown = by_door["wire" if same else door]
                lines += [f"{call.operation} | {call.about} | {door} | {line}" for line in shown]
    finally:
        await broker.close()
    return lines


def lines_of(answers: dict[str, str]) -> list[str]:
    """Who is answered what, the commonest answer last."""
    who: dict[str, list[str]] = {}
    for shown, answer in answers.items():
        who.setdefault(answer, []).append(shown)
    *rare, common = sorted(who, key=lambda answer: (len(who[answer]), answer))
    told = [f"{', '.join(who[answer])}: {answer}" for answer in rare]
    return [*told, f"{'everybody' if not rare else 'everybody else'}: {common}"]


# ---- the routes of HTTP ----

TOPIC, GROUP = "/topics/orders", "/topics/orders/groups/billing"
ROUTES: dict[str, Any] = {
    "GET /topics": None, "POST /topics": {"name": "orders"}, f"GET {TOPIC}": None, f"PATCH {TOPIC}": {},
    f"DELETE {TOPIC}": None, f"POST {TOPIC}/purge": None, f"DELETE {TOPIC}/delayed/1": None,
    f"GET {TOPIC}/delayed": None,
    f"GET {TOPIC}/route": None, f"GET {TOPIC}/route/history": None,
    f"POST {TOPIC}/route/split": {"partition": 0}, f"POST {TOPIC}/route/merge": {"one": 0, "other": 1},
    f"POST {TOPIC}/route/move": {"partition": 0}, f"POST {TOPIC}/messages": {"messages": [{"value": "x"}]},
    f"GET {TOPIC}/groups": None, f"POST {TOPIC}/groups": {"group": "billing"}, f"PATCH {GROUP}": {},
    f"DELETE {GROUP}": None, f"POST {GROUP}/pause": None, f"POST {GROUP}/resume": None,
    f"POST {GROUP}/reset": {"to": "earliest"}, f"POST {GROUP}/convert": {"mode": "kafka", "dry_run": True},
    f"GET {GROUP}/lag": None, f"GET {GROUP}/lanes": None,
    f"POST {GROUP}/poll": {"wait_s": 0}, f"POST {GROUP}/settle": {},
    f"GET {GROUP}/dead-letters": None, f"POST {GROUP}/dead-letters/redrive": {"all": True},
    f"POST {GROUP}/dead-letters/discard": {"all": True}, f"GET {GROUP}/stopped": None,
    f"POST {GROUP}/stopped/restart": {"all": True}, f"POST {GROUP}/stopped/skip": {"all": True},
    f"POST {GROUP}/stopped/drop": {"all": True},
    "GET /shards": None, "POST /shards/first/drain": None, "POST /shards/first/open": None,
    "GET /rates": None, "PUT /rates": {"topic": "orders", "messages_per_s": 5}, "GET /brokers": None,
    "GET /schedules": None, "GET /audit-log": None, "GET /principals": None,
}  # fmt: skip


async def found_routes() -> list[str]:
    lines = []
    async with staged(dev=False) as stage:
        for number, texts in enumerate(PERMISSIONS.values()):
            stage.add(f"principal-{number}", *texts)
        for route, body in ROUTES.items():
            method, path = route.split()
            answers = {}
            for number, shown in enumerate(PERMISSIONS):
                headers = {"Authorization": f"Bearer {stage.tokens[f'principal-{number}']}"}
                reply = await stage.client.request(method, API + path, json=body, headers=headers)
                assert reply.status_code < 500 and "invalid_request" not in reply.text, reply.text
                answers[shown] = "denied" if reply.status_code == 403 else "done"
            lines += [f"{route} | {line}" for line in lines_of(answers)]
    return lines


async def test_every_route_is_in_the_list() -> None:
    async with staged() as stage:
        paths = (await stage.client.get("/openapi.json")).json()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    filled = {
        one.replace("{topic}", "orders").replace("{group}", "billing").replace("{name}", "first")
        .replace("{id}", "1").replace(API, "")
        for one in served if API in one
    }  # fmt: skip
    assert filled == set(ROUTES)


# ---- the record ----


async def everything() -> str:
    return "\n".join([*await found(), "", *await found_routes()]) + "\n"


async def test_every_operation_asks_for_the_same_permission_as_ever() -> None:
    assert (await everything()).splitlines() == RECORDED.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    if sys.argv[1:] == ["--show"]:
        print(asyncio.run(everything()), end="")
    else:
        RECORDED.write_text(asyncio.run(everything()), encoding="utf-8")
