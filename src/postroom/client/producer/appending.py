"""One batch on its way into the store, repeated until its fate is known or its callers' time is over.

Decides what an error means for a batch: try the very same bytes again, give it up, or take it back because
it was surely not stored: then what may go anywhere goes elsewhere, if its store is away and another is not.
Must never change the bytes (I3), and must mark a batch as uncertain whenever a try of it may have been
stored, or may yet be: its sequence is then never used for anything else, and it goes nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...address import FIRST_SHARD
from ...backoff import pause
from ...config import DEFAULTS, ClientTuning
from ...endpoint.endpoint import Endpoint
from ...endpoint.values import NEVER_STORED
from ...errors import (
    BacklogFull,
    BrokerUnavailable,
    PartitionSealed,
    PostroomError,
    SendTimeout,
    SequenceGap,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnknownFate,
    UnknownPartition,
    UnknownProducer,
    UnknownTopic,
)
from ...model.topology.route import Range
from ...store.contract import Appended
from .parcel import Parcel, ids_of

__all__ = [
    "MOVED",
    "Failed",
    "InFlight",
    "Refused",
    "append",
    "append_until",
    "is_away",
    "last_error",
    "unstored",
]

MOVED = (PartitionSealed, UnknownPartition, UnknownTopic)  # surely not stored: the route says where else


_SAID = {
    "refused": "connection refused by {}",
    "read_only": "{} takes no writes: it is read-only",
    "no_answer": "no answer from {}",
    "lost": "the connection to {} was lost",
    "unreachable": "{} cannot be reached",
    "crowded": "{} takes no more connections",
}
"""What is told of an error, by its `reason`; the whole of it is the cause."""


@dataclass(slots=True)
class Failed:
    error: PostroomError


@dataclass(slots=True)
class Refused:
    """Surely not stored, and not the callers' affair: its messages leave again."""


class InFlight:
    """A batch under way."""

    __slots__ = (
        "alone",
        "answer",
        "away",
        "before",
        "began",
        "client",
        "data",
        "deadline",
        "due_at",
        "elsewhere",
        "error",
        "ids",
        "moved",
        "number",
        "parcels",
        "resolved",
        "sequence",
        "span",
        "tries",
        "unanswered",
        "uncertain",
        "where",
    )

    def __init__(
        self,
        number: int,
        where: Range,
        parcels: list[Parcel],
        data: bytes,
        sequence: int,
        before: Callable[[InFlight], InFlight | None],
        by_id: bool = False,
        client: str = "",
    ) -> None:
        self.client = client  # whose limits it counts against (R40)
        self.where, self.parcels, self.data, self.sequence = where, parcels, data, sequence
        self.due_at = parcels[0].due_at
        self.ids = ids_of(parcels) if self.due_at or by_id else b""  # the topic looks at them
        self.number = number  # in the order they left this partition's accumulator
        self.deadline = parcels[0].call.deadline
        if len(parcels) > 1:
            self.deadline = max([parcel.call.deadline for parcel in parcels])
        self.before = before  # the unresolved batch right before it
        self.resolved: asyncio.Future[None] | None = None  # is done then, if somebody waits for it
        self.tries = 0
        self.uncertain = False  # a try may have been stored, or may yet be
        self.moved = False  # its partition takes no more
        self.away = False  # the store was away when it came, and it is being repeated
        self.elsewhere = False  # it was refused because of that: what may go anywhere is not to come back
        self.error: PostroomError | None = None  # of the last try
        self.unanswered = False  # a try ended with an error that leaves open whether it was stored
        self.span: Any = None  # of posted messages, if somebody traces
        self.alone = False  # nothing that it could have overtaken was under way when this try began
        self.began = 0.0  # this try, by the loop's clock
        self.answer: asyncio.Future[Appended] | None = None  # to the first try, if that was by the short way

    def begin_try(self, now: float) -> None:
        self.tries += 1
        self.began, self.alone = now, self.before(self) is None

    def failed(self, error: PostroomError) -> None:
        """A try of it failed: whoever stops waiting is told why."""
        self.unanswered = self.unanswered or (isinstance(error, StoreError) and not unstored(error))
        if isinstance(error, SequenceGap) and self.error is not None:
            return  # it waits for one before it, and that was the reason
        self.error = error
        for parcel in self.parcels:
            parcel.call.trouble = error


async def append_until(
    endpoint: Endpoint,
    topic: str,
    batch: InFlight,
    loop: asyncio.AbstractEventLoop,
    *,
    broken: Callable[[], bool],
    away: Callable[[PostroomError | None], bool],
    tuning: ClientTuning = DEFAULTS.tuning.client,
) -> Appended | Failed | Refused:
    """`broken`: a batch before this one was given up, so a gap before it will not close. `away` is told when
    the store is away, or does not answer (None); it says whether messages may go elsewhere.

    The first try of a batch may have begun already, by the short way (`Endpoint.append_soon`).

    Nor will one before a batch that is the first under way: the store has forgotten batches that it had
    confirmed (a volatile topic, and a crash).
    """
    while True:
        answer = batch.answer
        if answer is None:
            batch.begin_try(loop.time())
        first = batch.alone
        silent = loop.call_later(tuning.silent_s if answer is None else 0, away, None)
        try:
            async with asyncio.timeout_at(batch.deadline):
                return await (append(endpoint, topic, batch) if answer is None else answer)
        except TimeoutError as error:
            return _cut_off(batch, loop.time() - batch.began, waited_only=_never_stored(error))
        except SequenceGap as error:
            batch.failed(error)
            if batch.before(batch) is None and (first or broken()):
                batch.uncertain = (
                    batch.uncertain or not broken()
                )  # a crash forgot what was stored: a new epoch
                return Refused()
        except UnknownProducer as error:
            batch.failed(error)
            outcome = _unknown_here(batch, error, broken())
            if outcome is not None:
                return outcome
        except PostroomError as error:
            batch.failed(error)
            outcome = _outcome(batch, error)
            if outcome is not None:
                return outcome
            if is_away(error) and away(error) and not batch.uncertain:
                batch.elsewhere = True
                return Refused()
        except Exception as error:  # not ours: nobody may be left waiting because of it
            return _surprised(batch, error)
        finally:
            silent.cancel()
            batch.answer = None
        if not await _may_repeat(batch, loop, tuning.last_try_s):
            return _given_up(batch)


async def append(endpoint: Endpoint, topic: str, batch: InFlight) -> Appended:
    """One try."""
    if not batch.due_at and not batch.ids:
        return await endpoint.append(topic, batch.where.partition_id, batch.data, producer=batch.client)
    return await endpoint.append(
        topic,
        batch.where.partition_id,
        batch.data,
        due_at=batch.due_at,
        ids=batch.ids,
        producer=batch.client,
    )


def _unknown_here(batch: InFlight, error: UnknownProducer, broken: bool) -> Failed | Refused | None:
    """The partition has nothing of this producer. None: the same bytes again."""
    alone = batch.before(batch) is None
    if not batch.uncertain or (alone and broken):
        batch.uncertain = True  # the store forgot this producer, or those before were not stored: a new epoch
        return Refused()
    return Failed(error) if alone else None  # stored and forgotten, perhaps; or its time has not come


def _outcome(batch: InFlight, error: PostroomError) -> Failed | Refused | None:
    """None: the same bytes again."""
    if isinstance(error, MOVED):
        batch.moved = True
        return Refused()
    if isinstance(error, StoreFull | BacklogFull) and not batch.uncertain:
        return Failed(error)  # nothing was stored; waiting for space is the caller's choice
    if isinstance(error, StoreUnavailable) and not unstored(error):
        batch.uncertain = True
    if error.retriable:
        return None
    batch.uncertain = True
    return Failed(error)


async def _may_repeat(batch: InFlight, loop: asyncio.AbstractEventLoop, last_try_s: float) -> bool:
    """Wait a little, or for the batch before; False when the time is over."""
    left = batch.deadline - loop.time()
    if left <= 0:
        return False
    before = batch.before(batch)
    if before is not None:
        if before.resolved is None:
            before.resolved = loop.create_future()
        await asyncio.wait((before.resolved,), timeout=left)
    else:
        await asyncio.sleep(min(pause(batch.tries), left))
    return batch.deadline - loop.time() > (0 if batch.uncertain else last_try_s)


def _surprised(batch: InFlight, error: Exception) -> Failed:
    batch.uncertain = True
    failure = UnknownFate(
        f"an unexpected error while a batch was stored: {error!r}; look whether it is there"
    )
    failure.__cause__ = error
    return Failed(failure)


def _never_stored(error: TimeoutError) -> bool:
    """Whether its time ended while it waited for its turn: nothing had begun."""
    gone = error.__cause__
    return isinstance(gone, asyncio.CancelledError) and gone.args[:1] == (NEVER_STORED,)


def unstored(error: PostroomError) -> bool:
    """Whether the try that met this error surely stored nothing."""
    return error.details.get("stored") is False


def is_away(error: Exception) -> bool:
    """Whether it is the store of a partition that is away: not the way to it, which is the same for all."""
    return isinstance(error, StoreUnavailable) and not isinstance(error, BrokerUnavailable)


def last_error(error: PostroomError) -> str:
    """What of it is told to whoever stops waiting."""
    said = _SAID.get(str(error.details.get("reason")))
    if said is None:
        return f"last error: {error.code}: {error}"
    shard = error.details.get("shard")
    return "last error: " + said.format(
        "the database" if shard is None else f"shard {str(shard) or FIRST_SHARD!r}"
    )


def _cut_off(batch: InFlight, waited_s: float, *, waited_only: bool) -> Failed:
    """Its time ended while it was being tried."""
    if waited_only and not batch.uncertain:
        return _too_late(
            batch,
            f"{_messages(batch)} waited for a rate limit until the time was over, and nothing was stored: "
            "give it more time (timeout=), or raise the limit; mq.rates() lists it",
            stored=False,
            reason="rate_limit",
        )
    batch.uncertain = True
    if batch.error is None:
        shard = batch.where.shard
        known = {} if shard in ("", FIRST_SHARD) else {"shard": shard}  # else there may be no other
        batch.error = StoreUnavailable(
            f"no answer from partition {batch.where.partition} for {waited_s:.1f} s",
            reason="no_answer",
            **known,
        )
    return _given_up(batch)


def _given_up(batch: InFlight) -> Failed:
    batch.uncertain = batch.uncertain or batch.unanswered
    why = "" if batch.error is None else f"; {last_error(batch.error)}"
    if not batch.uncertain:
        return _too_late(
            batch,
            f"no receipt within the time for {_messages(batch)}: nothing was stored, sending again is safe"
            f"{why}",
            stored=False,
            tries=batch.tries,
        )
    return _too_late(
        batch,
        f"no receipt within the time for {_messages(batch)}: it is not known whether anything was stored; "
        f"look before sending again{why}",
        tries=batch.tries,
    )


def _messages(batch: InFlight) -> str:
    count = sum(len(parcel.entries) for parcel in batch.parcels)
    return f"{count} message{'s' if count > 1 else ''} to partition {batch.where.partition}"


def _too_late(batch: InFlight, sentence: str, **details: Any) -> Failed:
    count = sum(len(parcel.entries) for parcel in batch.parcels)
    failure = SendTimeout(sentence, partition=batch.where.partition, messages=count)
    if batch.error is not None:
        failure.__cause__ = batch.error
        failure.details["error"] = batch.error.code
        if "reason" in batch.error.details:
            failure.details["reason"] = batch.error.details["reason"]
        if "shard" in batch.error.details:
            failure.details["shard"] = batch.error.details["shard"] or FIRST_SHARD
    failure.details |= details
    return Failed(failure)
