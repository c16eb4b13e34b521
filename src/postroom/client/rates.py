"""What a connection can do about rate limits: set them, take them away, list them (R40).

Turns friendly arguments into a `Rate`. Must never guess what a limit is about: a topic, a group of one, or
a producer, and exactly one of them.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from ..broker.endpoint import Endpoint, RateInfo
from ..errors import InvalidSetting
from ..model.flow import Rate, group_rate, producer_rate, topic_rate
from ..units import size_bytes
from .guard import Guard

__all__ = ["RateLimits"]


class RateLimits:
    """The part of a connection that is about limits."""

    _endpoint: Endpoint
    _guard: Guard

    if TYPE_CHECKING:

        async def _explained(self, topic: str, call: Awaitable[Any]) -> Any: ...

    async def limit_rate(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        producer: str | None = None,
        messages_per_s: float | None = None,
        bytes_per_s: int | str | None = None,
    ) -> None:
        """Limit what a topic takes, a group of it is handed, or a producer sends, in a second.

        `limit_rate(topic="orders", messages_per_s=1000, bytes_per_s="10MB")`; a `producer` is the `client_id`
        of a connection, or on a served broker its principal. All who send or receive share it, in all
        processes. Senders are slowed, never refused, until their own time-out. The call says all there is to
        the limit: what is left out, None or 0 is not limited, and without both there is no limit any more. It
        is in force everywhere within a second.
        """
        self._guard.check()
        rate = _rate(topic, group, producer, messages_per_s, bytes_per_s)
        await self._explained(topic or "", self._endpoint.set_rate(rate))

    async def rates(self) -> list[RateInfo]:
        """All limits, and for how long whoever comes now waits for each."""
        self._guard.check()
        return await self._endpoint.rates()


def _rate(
    topic: str | None,
    group: str | None,
    producer: str | None,
    messages_per_s: float | None,
    bytes_per_s: int | str | None,
) -> Rate:
    if (topic is None) == (producer is None) or (group is not None and topic is None):
        raise InvalidSetting(
            'a limit is on a topic (topic="orders"), on a group of it (topic="orders", group="billing"), '
            'or on a producer (producer="shop")'
        )
    for name, value in (("topic", topic), ("group", group), ("producer", producer)):
        if value is not None and not isinstance(value, str):
            raise InvalidSetting(f"{name}={value!r}: its name, as text")
    messages: float = 0 if messages_per_s is None else messages_per_s
    size = 0 if bytes_per_s is None else size_bytes(bytes_per_s, name="bytes_per_s")
    if producer is not None:
        return producer_rate(producer, messages, size).check()
    assert topic is not None, "one of them was given"
    return (
        group_rate(topic, group, messages, size) if group is not None else topic_rate(topic, messages, size)
    ).check()
