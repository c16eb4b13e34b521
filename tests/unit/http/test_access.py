"""Who is let in over HTTP, and what each may do there (R48)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import httpx
import pytest

from postroom.broker.access import Gatekeeper, new_token
from postroom.broker.broker import Broker
from postroom.clock import SystemClock
from postroom.endpoint.operations import OPERATIONS
from postroom.endpoint.values import Beat, Held, PollRequest, Settle, UnparkRequest
from postroom.errors import PermissionDenied
from postroom.http.access import CERTIFICATE_NAME, Permitted, token_of
from postroom.model.access import Principal, parse_permissions
from postroom.model.messages.batch import BatchBuilder
from postroom.model.policy.rate import topic_rate
from tests.unit.http.http_client import API, Stage, staged


@pytest.fixture
async def guarded() -> Any:
    async with staged(dev=False) as stage:
        stage.add("admin", "manage:*", "send:*", "consume:*")
        stage.add("shop", "send:orders")
        stage.add("billing", "consume:orders")
        stage.add("nobody")
        for topic in ("orders", "secrets"):
            await stage.post("/topics", {"name": topic}, 201, who="admin")
        yield stage


async def test_without_a_token_nobody_comes_in(guarded: Stage) -> None:
    for method, path in (("GET", f"{API}/topics"), ("GET", "/metrics"), ("POST", f"{API}/topics/x/messages")):
        error = await guarded.error(method, path, 401)
        assert error["code"] == "not_authenticated"


async def test_what_is_about_no_queue_is_open(guarded: Stage) -> None:
    for path in ("/health", "/ready", "/docs", "/openapi.json"):
        assert (await guarded.client.get(path)).status_code == 200


async def test_a_token_comes_in_either_header(guarded: Stage) -> None:
    token = guarded.tokens["shop"]
    for headers in ({"Authorization": f"bearer {token}"}, {"X-Postroom-Token": token}):
        assert (await guarded.client.get(f"{API}/topics", headers=headers)).status_code == 200


async def test_a_wrong_token_is_refused_and_never_shown(
    guarded: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    for secret in (
        "Basic YTpi",
        "Bearer",
        "Bearer pst_wrong",
        f"Bearer {'x' * 5000}",
        f"Bearer {new_token()}",
    ):
        with caplog.at_level(logging.DEBUG):
            found = await guarded.client.get(f"{API}/topics", headers={"Authorization": secret})
        assert found.status_code == 401 and "WWW-Authenticate" in found.headers
        hidden = secret.partition(" ")[2] or "pst_w"
        assert hidden not in caplog.text and hidden not in found.text


async def test_a_token_is_never_logged_or_shown(guarded: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await guarded.error("GET", f"{API}/topics/secrets", 403, who="shop")
        await guarded.call("GET", "/metrics", who="shop")
    assert guarded.tokens["shop"] not in caplog.text


async def test_permissions_are_those_of_the_wire(guarded: Stage) -> None:
    one = {"messages": [{"value": "x"}]}
    await guarded.call("POST", f"{API}/topics/orders/messages", 202, json=one, who="shop")
    error = await guarded.error("POST", f"{API}/topics/secrets/messages", 403, json=one, who="shop")
    assert error["code"] == "permission_denied" and "send:secrets" in error["message"]
    await guarded.error("POST", f"{API}/topics/orders/groups/g/poll", 403, json={}, who="shop")
    found = await guarded.post("/topics/orders/groups/g/poll", {}, who="billing")
    handle = found["messages"][0]["handle"]
    await guarded.error("POST", f"{API}/topics/orders/messages", 403, json=one, who="billing")
    broken = {"content": b"{", "headers": {"Content-Type": "application/json"}}  # nobody looks into it before
    await guarded.error("POST", f"{API}/topics/orders/messages", 403, **broken, who="billing")
    await guarded.error("DELETE", f"{API}/topics/orders", 403, who="billing")
    await guarded.error("GET", f"{API}/shards", 403, who="billing")
    settling = {"json": {"acks": [handle]}}
    await guarded.error("POST", f"{API}/topics/orders/groups/g/settle", 403, **settling, who="shop")
    await guarded.call("POST", f"{API}/topics/orders/groups/g/settle", 200, **settling, who="billing")


async def test_settling_nothing_needs_the_permission_too(guarded: Stage) -> None:
    empty = {"json": {}}
    await guarded.error("POST", f"{API}/topics/orders/groups/g/settle", 403, **empty, who="shop")
    await guarded.error("POST", f"{API}/topics/secrets/groups/g/settle", 403, **empty, who="billing")
    await guarded.call("POST", f"{API}/topics/orders/groups/g/settle", 200, **empty, who="billing")


async def test_only_visible_topics_are_listed_or_suggested(guarded: Stage) -> None:
    shown = await guarded.get("/topics", who="shop")
    assert [topic["name"] for topic in shown] == ["orders"]
    guarded.add("guesser", "send:secret")
    error = await guarded.error("GET", f"{API}/topics/secret", 404, who="guesser")
    assert "secrets" not in str(error)


async def test_whether_a_topic_exists_is_not_told_to_those_without_permission(guarded: Stage) -> None:
    there = await guarded.error("GET", f"{API}/topics/secrets", 403, who="shop")
    not_there = await guarded.error("GET", f"{API}/topics/nothing", 403, who="shop")
    assert there["message"].replace("secrets", "nothing") == not_there["message"]


async def test_metrics_show_names_to_those_who_may_see_them(guarded: Stage) -> None:
    guarded.add("prometheus", "consume:_metrics")
    one = {"messages": [{"value": "x"}]}
    for topic in ("orders", "secrets", "secrets"):
        await guarded.call("POST", f"{API}/topics/{topic}/messages", 202, json=one, who="admin")
    for topic in ("orders", "secrets"):
        await guarded.post(f"/topics/{topic}/groups/{topic}-group/poll", {}, who="admin")
    limit = {"producer": "shop", "messages_per_s": 5}
    await guarded.call("PUT", f"{API}/rates", json=limit, who="admin")
    published = "postroom_messages_published_total"
    for who, shown, hidden in (
        ("admin", ("orders", "secrets", "orders-group", "secrets-group", 'producer="shop"'), ()),
        ("prometheus", ("orders", "secrets", "orders-group", "secrets-group", 'producer="shop"'), ()),
        ("billing", ("orders", "orders-group"), ("secrets", 'producer="shop"')),
        ("nobody", (), ("orders", "secrets", 'producer="shop"')),
    ):
        guarded.app.state.metrics.sampler.last.taken_at = None
        text = (await guarded.call("GET", "/metrics", who=who)).text
        assert "postroom_build_info" in text
        assert all(name in text for name in shown), who
        assert not any(name in text for name in hidden), who
        total = sum(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{published}{{")
        )
        assert total == 3, who
        lags = [line for line in text.splitlines() if line.startswith("postroom_group_lag_messages{")]
        assert sum(float(line.split()[-1]) for line in lags) == 3 and len(lags) == max(1, len(shown) and 2)


async def test_nobody_can_have_a_topic_of_the_name_that_stands_for_all_names(guarded: Stage) -> None:
    assert (await guarded.error("POST", f"{API}/topics", 400, json={"name": "_metrics"}, who="admin"))["code"]


async def test_a_removed_principal_is_out(guarded: Stage) -> None:
    guarded.add("short", "send:orders")
    await guarded.get("/topics", who="short")
    guarded.broker.store.access.remove("short")
    guarded.service.gatekeeper._known.clear()  # `access_fresh_ms` has passed
    await guarded.error("GET", f"{API}/topics", 401, who="short")


async def test_a_permission_taken_away_counts_for_the_next_request(guarded: Stage) -> None:
    one = {"messages": [{"value": "x"}]}
    await guarded.call("POST", f"{API}/topics/orders/messages", 202, json=one, who="shop")
    guarded.broker.store.access.permit("shop", (), (next(iter(_permissions(guarded, "shop"))),))
    guarded.service.gatekeeper._known.clear()
    await guarded.error("POST", f"{API}/topics/orders/messages", 403, json=one, who="shop")


def _permissions(stage: Stage, name: str) -> Any:
    found = stage.broker.store.access.by_name(name)
    assert found is not None
    return found.permissions


async def test_the_name_in_a_certificate_counts(guarded: Stage) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await guarded.app({**scope, CERTIFICATE_NAME: "shop"}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert [t["name"] for t in (await client.get(f"{API}/topics")).json()] == ["orders"]


# ---- --dev ----


async def test_on_this_machine_dev_needs_no_token() -> None:
    async with staged() as stage:
        await stage.get("/topics")
        far = httpx.ASGITransport(stage.app, client=("10.0.0.9", 1))
        async with httpx.AsyncClient(transport=far, base_url="http://localhost") as client:
            assert (await client.get(f"{API}/topics")).status_code == 401


async def test_dev_is_not_for_pages_of_other_sites() -> None:
    async with staged() as stage:
        for headers, status in (
            ({"Host": "127.0.0.1:7071"}, 200),
            ({"Host": "[::1]:7071"}, 200),
            ({"Host": "localhost:7071", "Origin": "http://localhost:7071"}, 200),
            (
                {"Host": "localhost:7071", "Origin": "http://localhost:9999"},
                403,
            ),  # another port: another site
            ({"Host": "localhost:7071", "Sec-Fetch-Site": "same-site"}, 403),
            ({"Host": "localhost:7071", "Sec-Fetch-Site": "same-origin"}, 200),
            ({"Host": "evil.example:7071"}, 403),  # a name that was pointed at this machine
            ({"Host": "localhost", "Origin": "https://evil.example"}, 403),
            ({"Host": "localhost", "Origin": "null"}, 403),
            ({"Host": "[oops"}, 403),
        ):
            assert (await stage.client.get(f"{API}/topics", headers=headers)).status_code == status, headers


async def test_forwarded_headers_are_not_believed() -> None:
    async with staged() as stage:
        far = httpx.ASGITransport(stage.app, client=("10.0.0.9", 1))
        async with httpx.AsyncClient(transport=far, base_url="http://localhost") as client:
            headers = {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1"}
            assert (await client.get(f"{API}/topics", headers=headers)).status_code == 401


# ---- every verb is guarded ----


class Untouched:
    """A broker that nobody may reach."""

    def __getattr__(self, name: str) -> Any:
        async def verb(*args: Any, **named: Any) -> None:
            raise AssertionError(f"{name} was reached")

        return verb

    def beat(self, beats: Any) -> None:
        raise AssertionError("beat was reached")


def arguments(verb: str) -> dict[str, Any]:
    """For an operation: about secrets, if it is about a topic."""
    if verb == "poll":
        return {"request": PollRequest("secrets", "g", "m", 1, 1, 1, 0, True)}
    if verb == "unpark":
        return {"request": UnparkRequest("secrets", "g", "m", 1, 1, 1, b"k", 1, 2, 1, 1)}
    if verb == "settle":
        return {"topic": "orders", "group": "g", "parts": [Settle("secrets", 1, 1, ())]}
    if verb == "settle_and_poll":
        return {**arguments("settle"), **arguments("poll"), "settled": print}
    if verb == "beat":
        return {"beats": [Beat("orders", "g", "m", "c", (Held("secrets", 1, 1, ((0, 0),)),))]}
    if verb == "set_rate":
        return {"rate": topic_rate("secrets", 1)}
    fields = OPERATIONS[verb].request.__struct_fields__
    return {name: ("secrets",) if name == "topics" else "secrets" for name in fields}


@pytest.mark.parametrize("verb", sorted(name for name, one in OPERATIONS.items() if one.need != "none"))
async def test_no_verb_is_done_without_its_permission(verb: str) -> None:
    principal = Principal("mallory", ())
    gatekeeper = Gatekeeper(cast(Any, None), cast(Any, None), SystemClock())
    permitted = Permitted(cast(Broker, Untouched()), gatekeeper, principal)
    if verb in (
        "settle",
        "settle_and_poll",
        "beat",
    ):  # the topic of the path is allowed, that of the handle is not
        permitted.principal = Principal("mallory", parse_permissions(["consume:orders"]))
    call = getattr(permitted, verb)
    with pytest.raises(PermissionDenied):
        await (asyncio.to_thread(call, **arguments(verb)) if verb == "beat" else call(**arguments(verb)))


async def test_a_producer_is_its_principal(guarded: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    producers = []
    append = guarded.broker.append

    async def noted(*args: Any, producer: str = "", **named: Any) -> Any:
        producers.append(producer)
        return await append(*args, **named)

    monkeypatch.setattr(guarded.broker, "append", noted)
    one = {"messages": [{"value": "x"}]}
    await guarded.call("POST", f"{API}/topics/orders/messages", 202, json=one, who="shop")
    assert producers == ["shop"]
    caller = guarded.service.caller(Principal("billing", parse_permissions(["send:orders"])))
    await caller.broker.append("orders", 1, batch_of(b"x"), producer="shop")  # whatever it says
    assert producers == ["shop", "billing"]


def batch_of(value: bytes) -> bytes:
    builder = BatchBuilder()
    builder.append(0, None, value, [])
    return builder.build()


def test_tokens_that_are_made_are_taken() -> None:
    token = new_token()
    assert token_of({b"authorization": f"Bearer  {token} ".encode()}) == token
    assert token_of({}) is None
