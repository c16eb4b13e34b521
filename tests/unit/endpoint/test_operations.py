"""The table of operations: a row for every method of `Endpoint`, and nothing that could be guessed."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest

from postroom.broker.broker import Broker
from postroom.broker.served import MeteredBroker
from postroom.client.forward.outbox_source import DrawingEndpoint
from postroom.endpoint.asking import AskingEndpoint
from postroom.endpoint.endpoint import Endpoint
from postroom.endpoint.operations import OPERATIONS, Operation, operation_of
from postroom.http.access import Permitted
from postroom.model.access import ANONYMOUS, Principal
from postroom.wire import messages as m
from postroom.wire.client.remote import RemoteEndpoint

LOCAL = {
    "now_ms",
    "reached_ms",
    "close",
    "append_soon",
    "lone_append",
}  # no operations: answered without asking, or only in the same process
METHODS = {
    name: method for name, method in vars(Endpoint).items() if not name.startswith("_") and name not in LOCAL
}
every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


def parameters(owner: Any, name: str) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(getattr(owner, name)).parameters)
    del found["self"]
    return found


def test_every_method_has_a_row_and_every_row_a_method() -> None:
    assert set(OPERATIONS) == set(METHODS)


def test_every_kind_is_one_operation() -> None:
    every = (m.LIST_BROKERS, *OPERATIONS.values())
    kinds = [one.kind for one in every] + [m.HELLO, m.CANCEL, m.ASK]
    assert len(set(kinds)) == len(kinds)
    assert all(0 < kind < 256 for kind in kinds)
    assert all(operation_of(one.kind) is one for one in OPERATIONS.values())


def test_what_is_not_in_the_table_cannot_be_asked() -> None:
    assert operation_of(250) is None and operation_of(m.BROKERS) is None
    for asked in (RemoteEndpoint, Permitted, MeteredBroker):
        assert not hasattr(asked, "drop_everything") and "__getattr__" not in vars(asked)


@every_operation
def test_the_fields_of_a_request_are_the_arguments_of_the_method(operation: Operation) -> None:
    names = list(parameters(Endpoint, operation.name))
    other = {operation.body, operation.early}
    assert [name for name in names if name not in other] == [*operation.request.__struct_fields__]
    assert other & {*names} == other - {""}


@every_operation
def test_the_reply_is_what_the_method_returns(operation: Operation) -> None:
    found = typing.get_type_hints(METHODS[operation.name])["return"]
    assert operation.reply == (None if found is type(None) else found)


@every_operation
def test_the_broker_does_it_and_takes_what_it_is_told(operation: Operation) -> None:
    """Who asks, and nothing else, comes on top of what a client says."""
    wanted, taken = parameters(Endpoint, operation.name), parameters(Broker, operation.name)
    assert list(taken)[: len(wanted)] == list(wanted)
    told = {*operation.told(Principal("shop", ())), *operation.told(ANONYMOUS)}
    assert told <= set(taken)
    more = set(taken) - set(wanted) - {"drawn", "in_line"}  # which only others in this process say
    assert more == told - set(wanted)


@every_operation
@pytest.mark.parametrize("between", [RemoteEndpoint, Permitted, MeteredBroker, DrawingEndpoint])
def test_whoever_stands_between_passes_it_on(operation: Operation, between: type[AskingEndpoint]) -> None:
    """None of them has the protocol's own method, which does nothing."""
    assert getattr(between, operation.name) is not METHODS[operation.name]


@every_operation
def test_reading_and_waiting_may_be_repeated(operation: Operation) -> None:
    assert operation.repeatable or not (operation.reads or operation.waits)
    assert not (operation.small and operation.waits)


@every_operation
def test_whatever_manages_is_in_the_audit_log(operation: Operation) -> None:
    """And what only reads is not; nor is what sends, polls and settles, which has no time for it."""
    assert (operation.changes is None) or not (operation.reads or operation.waits)
    if operation.need == "manage":
        assert operation.reads or operation.changes is not None


@every_operation
def test_what_is_in_the_audit_log_says_what_it_is_about(operation: Operation) -> None:
    fields = {*operation.request.__struct_fields__}
    if operation.changes is not None:
        assert fields & {"topic", "name", "rate"}


async def test_arguments_are_bound_by_name() -> None:
    class Noted(AskingEndpoint):
        async def _ask(self, operation: Operation, arguments: dict[str, Any]) -> Any:
            return operation.name, arguments

        def beat(self, beats: Any) -> Any: ...
        def now_ms(self) -> int:
            return 0

        def reached_ms(self) -> int:
            return 0

        async def close(self) -> None: ...

    asked: Any = Noted()
    assert await asked.pause("orders", "billing", paused=True) == (
        "pause", {"topic": "orders", "name": "billing", "paused": True},
    )  # fmt: skip
    with pytest.raises(TypeError, match="takes 1 arguments, and 2 were given"):
        await asked.purge("orders", "invoices")
