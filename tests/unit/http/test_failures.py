"""Errors over HTTP: a status for every error, one shape, and nothing of the broker's insides."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from postroom import errors
from postroom.http.failures import STATUS, failure, status_of
from postroom.wire.messages import failure_of

TREE = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.PostroomError)
]


def body(response: JSONResponse) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(response.body))["error"]
    return found


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.code)
def test_every_error_has_a_status_that_fits_its_part_of_the_tree(kind: type[errors.PostroomError]) -> None:
    status = status_of(kind("no"))
    for above, allowed in (
        (errors.UsageError, {400, 413, 500, 503}),
        (errors.CatalogError, {404, 409, 429}),
        (errors.AppendError, {400, 409, 429, 504}),
        (errors.DeliveryError, {409}),
        (errors.AccessError, {401, 403}),
        (errors.StoreError, {500, 503, 507}),
    ):
        if issubclass(kind, above):
            assert status in allowed


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.UnknownTopic, 404),
        (errors.UnknownGroup, 404),
        (errors.TopicExists, 409),
        (errors.TopicConflict, 409),
        (errors.GroupConflict, 409),
        (errors.LeaseLost, 409),
        (errors.MessageTooLarge, 413),
        (errors.BacklogFull, 429),
        (errors.StoreFull, 507),
        (errors.StoreUnavailable, 503),
        (errors.StoreBusy, 503),
        (errors.NotAuthenticated, 401),
        (errors.PermissionDenied, 403),
        (errors.InvalidName, 400),
        (errors.SendTimeout, 504),
        (errors.StoreCorrupt, 500),
    ],
)
def test_statuses(kind: type[errors.PostroomError], status: int) -> None:
    response = failure(kind("a sentence", topic="orders"))
    assert response.status_code == status
    if status != 500:
        assert body(response)["message"] == "a sentence"
        assert body(response)["details"] == {"topic": "orders"}
        assert body(response)["code"] == kind.code


def test_the_table_names_errors_of_the_tree_only() -> None:
    assert set(STATUS) <= set(TREE)


@pytest.mark.parametrize("kind", [errors.BacklogFull, errors.StoreUnavailable, errors.StoreFull])
def test_who_may_try_again_is_told_when(kind: type[errors.PostroomError]) -> None:
    response = failure(kind("later"))
    assert int(response.headers["Retry-After"]) >= 1 and body(response)["retriable"] is True


def test_a_send_that_only_waited_for_a_limit_may_be_tried_again() -> None:
    waited = failure(errors.SendTimeout("waited for a limit", stored=False, reason="rate_limit"))
    assert waited.status_code == 429 and waited.headers["Retry-After"] == "1"
    for never_left in (
        failure(errors.SendTimeout("the route could not be read", stored=False)),
        failure(errors.SendTimeout("connection refused", stored=False, partition=1, reason="refused")),
    ):
        assert never_left.status_code == 503 and "Retry-After" in never_left.headers
    assert failure(errors.SendTimeout("who knows", tries=3)).status_code == 504


def test_those_who_are_served_are_told_what_they_can_do() -> None:
    """Over HTTP and over the wire; what is for the broker alone does not leave it."""
    error = errors.ShardUnknown("connect with shards=", shard="c", _served="ask the operator of the brokers")
    told = body(failure(error))
    assert (told["message"], told["details"]) == ("ask the operator of the brokers", {"shard": "c"})
    travelling = failure_of(error)
    assert (travelling.message, travelling.details) == ("ask the operator of the brokers", {"shard": "c"})


def test_who_is_not_known_is_told_how_to_say_it() -> None:
    assert failure(errors.NotAuthenticated("who?")).headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize("error", [RuntimeError("secret path /x"), errors.StoreError("near 'SELECT'")])
def test_a_fault_of_the_broker_is_in_its_log_only(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        response = failure(error)
    found = body(response)
    assert response.status_code == 500
    assert str(error) not in found["message"] and "reference" in found["details"]
    assert found["details"]["reference"] in caplog.text and str(error) in caplog.text


def test_details_are_plain_whatever_they_were() -> None:
    error = errors.CatalogError("no", raw=b"\xff", names=("a", "b"), nested={1: {2}}, _own="hidden")
    assert body(failure(error))["details"] == {"raw": "\ufffd", "names": ["a", "b"], "nested": {"1": [2]}}
