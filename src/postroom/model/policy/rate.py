"""Rates: how much a topic, a group or a producer takes in a second (R40, I17).

Of each limit one moment is kept: that up to which its rate is spent. It moves on with whatever is taken, and
lags behind the clock by a burst at most, so idleness saves up that much and no more. Once the moment has
passed the next may be taken, however much it is: a batch larger than the burst goes into debt and makes
others wait, rather than being refused. So within any time T no more passes than a burst, what the rate gives
in T, and one batch; and there always is a moment from which on the next may pass.

Pure: the clock is an argument, in microseconds. Whoever takes from a limit is served in the order of asking.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...errors import InvalidSetting
from ..topology.names import check_group, check_topic
from .bounds import RateName, Size

__all__ = ["NOTHING", "Kind", "Rate", "Spent", "debt_us", "give_back", "group_rate", "producer_rate", "spend",
           "topic_rate"]  # fmt: skip

Kind = Literal["topic", "group", "producer"]

BURST_US = {"topic": 1_000_000, "producer": 1_000_000, "group": 100_000}
"""What may be saved up, as time: a group is a funnel before a slow system, and is kept the narrower."""

SLICE_US = 100_000
"""What a broker takes of a rate at once, to share it out in memory."""

LEAST_PER_S, MOST_PER_S = 0.001, 2**53
_LONGEST_NAME = 120  # of a producer


@dataclass(frozen=True, slots=True)
class Rate:
    name: RateName  # "topic:orders", "group:orders/billing", "producer:shop"
    messages_per_s: float = 0  # 0: no limit
    bytes_per_s: Size = 0

    @property
    def kind(self) -> Kind:
        return self.name.partition(":")[0]  # type: ignore[return-value]

    @property
    def subject(self) -> tuple[str, str, str]:
        """Topic, group and producer; "" where it is not about one."""
        kind, _, rest = self.name.partition(":")
        if kind == "producer":
            return "", "", rest
        topic, _, group = rest.partition("/")
        return topic, group, ""

    @property
    def unlimited(self) -> bool:
        return not self.messages_per_s and not self.bytes_per_s

    @property
    def slice(self) -> tuple[int, int]:
        """Messages and bytes of a slice: at least one, where there is a limit."""
        return _slice(self.messages_per_s), _slice(self.bytes_per_s)

    def check(self) -> Rate:
        """InvalidName or InvalidSetting if there can be no such limit."""
        topic, group, producer = self.subject
        if self.kind not in BURST_US:
            raise InvalidSetting(
                f"{self.name!r} is no limit: name a topic, a group of a topic, or a producer"
            )
        if self.kind == "producer" and not _is_name(producer):
            raise InvalidSetting(
                f"producer={producer!r}: the client_id of a connection, or the name of a principal: 1 to "
                f"{_LONGEST_NAME} printable characters"
            )
        if self.kind != "producer":
            check_topic(topic)
        if self.kind == "group":
            check_group(group)
        _check_amount("messages_per_s", self.messages_per_s, whole=False)
        _check_amount("bytes_per_s", self.bytes_per_s, whole=True)
        return self


def topic_rate(topic: str, messages_per_s: float = 0, bytes_per_s: int = 0) -> Rate:
    return Rate(f"topic:{topic}", messages_per_s, bytes_per_s)


def group_rate(topic: str, group: str, messages_per_s: float = 0, bytes_per_s: int = 0) -> Rate:
    return Rate(f"group:{topic}/{group}", messages_per_s, bytes_per_s)


def producer_rate(producer: str, messages_per_s: float = 0, bytes_per_s: int = 0) -> Rate:
    return Rate(f"producer:{producer}", messages_per_s, bytes_per_s)


@dataclass(frozen=True, slots=True)
class Spent:
    """The moments up to which a limit is spent, in microseconds of the clock."""

    messages_at: int = 0
    bytes_at: int = 0


NOTHING = Spent()


def spend(spent: Spent, rate: Rate, now_us: int, messages: int, size: int) -> tuple[Spent, int]:
    """Take so much; returns what is spent then, and the moment from which on it may be used."""
    usable = max(
        now_us, spent.messages_at if rate.messages_per_s else 0, spent.bytes_at if rate.bytes_per_s else 0
    )
    since = usable - BURST_US[rate.kind]  # idleness before that is not saved up
    after = Spent(
        _moved(spent.messages_at, since, messages, rate.messages_per_s),
        _moved(spent.bytes_at, since, size, rate.bytes_per_s),
    )
    return after, usable


def give_back(spent: Spent, rate: Rate, messages: int, size: int) -> Spent:
    """Give back what was taken and not used; a negative amount was used and not taken."""
    return Spent(
        spent.messages_at - _cost_us(messages, rate.messages_per_s),
        spent.bytes_at - _cost_us(size, rate.bytes_per_s),
    )


def debt_us(spent: Spent, rate: Rate, now_us: int) -> int:
    """Return how long a caller that comes now has to wait."""
    return spend(spent, rate, now_us, 0, 0)[1] - now_us


def _moved(at: int, since: int, amount: int, per_s: float) -> int:
    return max(at, since) + _cost_us(amount, per_s) if per_s else at


def _cost_us(amount: int, per_s: float) -> int:
    """Rounded up, so that many small ones never come to less than one large one."""
    if not per_s:
        return 0
    return math.ceil(amount * 1_000_000 / per_s) if amount >= 0 else -_cost_us(-amount, per_s)


def _slice(per_s: float) -> int:
    return max(1, int(per_s * SLICE_US / 1_000_000)) if per_s else 0


def _is_name(name: str) -> bool:
    return 0 < len(name) <= _LONGEST_NAME and name.isprintable()


def _check_amount(name: str, value: object, *, whole: bool) -> None:
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if number and (value == 0 or (1 if whole else LEAST_PER_S) <= value <= MOST_PER_S):  # type: ignore[operator]
        return
    example = (
        "a whole number of bytes from 1 up"
        if whole
        else f"a number from {LEAST_PER_S} up, such as 100 or 0.5"
    )
    raise InvalidSetting(f"{name}={value!r}: {example}; 0 means no limit")
