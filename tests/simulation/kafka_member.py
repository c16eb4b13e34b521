"""A consumer of Kafka's, in a group: joins, is assigned partitions, fetches, handles, commits.

Speaks the real protocol to the real listener over the simulated network, and no more of it than that.
Commits what it has handled before it fetches again, and asks until it knows what became of a commit: taken,
or refused because others have its partitions by now.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

import postroom.kafka.server  # noqa: F401 - loaded before the simulator is installed
from postroom.kafka.messages import _built
from postroom.model.kafka_group import GroupError
from postroom.model.messages.batch import stored_records
from postroom.store.contract import StoredBatch
from postroom.testing.check import Event

from .plan import Group
from .roles import TOPIC, Notes, is_ready

__all__ = ["member"]

_FETCH, _COMMIT, _OFFSETS, _FIND, _JOIN, _BEAT, _SYNC = (
    (1, 11), (8, 7), (9, 5), (10, 2), (11, 4), (12, 3), (14, 3),
)  # fmt: skip
_ANSWER_S = 5.0
_LOST = (OSError, EOFError, TimeoutError)
_LEFT_BEHIND = (GroupError.ILLEGAL_GENERATION, GroupError.UNKNOWN_MEMBER, GroupError.REBALANCING)


class _RefusedError(Exception):
    """Begin again, with whoever coordinates the group."""


@cache
def _codecs(key: int, version: int) -> tuple[type[Any], Any, Any]:
    asked: type[Any] = load_request_schema(key, version)
    return asked, entity_writer(asked), entity_reader(load_response_schema(key, version))  # type: ignore[arg-type]


class _Wire:
    """A connection to one broker; requests one at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._id = reader, writer, 0

    async def ask(self, api: tuple[int, int], **values: Any) -> Any:
        kind, write, read = _codecs(*api)
        pieces = _Pieces()
        write(pieces, _built(kind, values))
        body = b"".join(pieces)
        self._id += 1
        header = struct.pack(">hhih", *api, self._id, -1)
        self._writer.write(struct.pack(">i", len(header) + len(body)) + header + body)
        async with asyncio.timeout(_ANSWER_S):
            (size,) = struct.unpack(">i", await self._reader.readexactly(4))
            data = await self._reader.readexactly(size)
        assert struct.unpack(">i", data[:4])[0] == self._id, "the answer to another request"
        return read(data[4:], 0)[0]

    def close(self) -> None:
        self._writer.close()


class _Pieces(list[bytes]):
    def write(self, piece: bytes) -> None:
        self.append(piece)


async def member(notes: Notes, group: Group, me: str, addresses: Sequence[tuple[str, int]]) -> None:
    await is_ready(notes)
    one = _Member(notes, group, me, addresses)
    while True:
        try:
            await one.run()
        except (*_LOST, _RefusedError) as error:
            notes.world.trace(f"joins again: {type(error).__name__} {error}")
            await asyncio.sleep(0.05)


class _Member:
    def __init__(self, notes: Notes, group: Group, me: str, addresses: Sequence[tuple[str, int]]) -> None:
        self._notes, self._group, self._me, self._addresses = notes, group, me, addresses
        self._wire: _Wire | None = None
        self._id, self._generation = "", -1
        self._session_s, self._heard_at = max(1.0, group.lease_s), 0.0

    async def run(self) -> None:
        partitions = await self._enter()
        at = await self._committed(partitions)
        self._notes.world.trace(f"is a member in generation {self._generation}: {at}")
        while await self._beats():
            found = (await self._fetched(at))[: self._notes.world.draw.choice((1, 1, 3, 100))]
            if asyncio.get_running_loop().time() >= self._heard_at + self._session_s:
                raise _RefusedError("it was silent for too long: others have its partitions")
            if found and not await self._handle(found, at):
                return

    # ---- being a member ----

    async def _coordinator(self) -> _Wire:
        """Ask one broker after the other who it is."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        for host, port in self._addresses:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    first = _Wire(*await asyncio.open_connection(host, port))
                    found = await first.ask(_FIND, key=self._group.name, key_type=0)
                    first.close()
                    if int(found.error_code):
                        continue
                    self._wire = _Wire(*await asyncio.open_connection(found.host, found.port))
                    return self._wire
            except _LOST:
                continue
        raise _RefusedError("no broker knows")

    async def _enter(self) -> list[int]:
        wire, name = await self._coordinator(), self._group.name
        joined = await self._join(wire)
        if int(joined.error_code) == GroupError.MEMBER_ID_REQUIRED:
            self._id = joined.member_id
            joined = await self._join(wire)
        self._check(int(joined.error_code), "join")
        self._id, self._generation = joined.member_id, joined.generation_id
        given = self._shared_out([one.member_id for one in joined.members])
        synced = await wire.ask(
            _SYNC, group_id=name, generation_id=self._generation, member_id=self._id, group_instance_id=None,
            assignments=[{"member_id": id, "assignment": bytes(some)} for id, some in given.items()],
        )  # fmt: skip
        self._check(int(synced.error_code), "sync")
        return list(synced.assignment)

    async def _join(self, wire: _Wire) -> Any:
        return await wire.ask(
            _JOIN, group_id=self._group.name, session_timeout=int(self._session_s * 1000),
            rebalance_timeout=2000, member_id=self._id, protocol_type="consumer",
            protocols=[{"name": "range", "metadata": _SUBSCRIPTION}],
        )  # fmt: skip

    def _shared_out(self, members: Sequence[str]) -> dict[str, list[int]]:
        """Of the leader, who alone is told the members."""
        found: dict[str, list[int]] = {id: [] for id in members}
        for number in range(self._notes.plan.partitions if members else 0):
            found[members[number % len(members)]].append(number)
        return found

    def _check(self, code: int, what: str) -> None:
        if code == GroupError.UNKNOWN_MEMBER:
            self._id = ""
        if code:
            raise _RefusedError(f"{what}: {code}")

    async def _beats(self) -> bool:
        assert self._wire is not None, "it is a member"
        self._heard_at = asyncio.get_running_loop().time()
        beat = await self._wire.ask(
            _BEAT, group_id=self._group.name, generation_id=self._generation, member_id=self._id,
            group_instance_id=None,
        )  # fmt: skip
        if int(beat.error_code) not in (0, GroupError.REBALANCING):
            self._check(int(beat.error_code), "heartbeat")
        return not int(beat.error_code)

    # ---- reading ----

    async def _committed(self, partitions: Sequence[int]) -> dict[int, int]:
        if not partitions:
            return {}
        assert self._wire is not None, "it is a member"
        topics = [{"name": TOPIC, "partition_indexes": tuple(partitions)}]
        found = await self._wire.ask(_OFFSETS, group_id=self._group.name, topics=topics)
        self._check(int(found.error_code), "offsets")
        return {
            one.partition_index: max(0, one.committed_offset)
            for topic in found.topics
            for one in topic.partitions
        }

    async def _fetched(self, at: dict[int, int]) -> list[tuple[int, int, str]]:
        """Partition, offset and value of some messages."""
        if not at:
            await asyncio.sleep(0.2)
            return []
        assert self._wire is not None, "it is a member"
        wanted = [
            {"partition": number, "current_leader_epoch": -1, "fetch_offset": offset, "log_start_offset": -1,
             "partition_max_bytes": 1 << 20}
            for number, offset in at.items()
        ]  # fmt: skip
        found = await self._wire.ask(
            _FETCH, replica_id=-1, max_wait=200, min_bytes=1, max_bytes=1 << 20, isolation_level=0,
            session_id=0, session_epoch=-1, topics=[{"topic": TOPIC, "partitions": wanted}],
            forgotten_topics_data=[], rack_id="",
        )  # fmt: skip
        self._check(int(found.error_code), "fetch")
        messages = []
        for one in (one for topic in found.responses for one in topic.partitions):
            self._check(int(one.error_code), "fetch")
            for offset, value in _messages(bytes(one.records or b"")):
                if offset >= at[one.partition_index]:
                    messages.append((one.partition_index, offset, value))
        return messages

    async def _handle(self, messages: list[tuple[int, int, str]], at: dict[int, int]) -> bool:
        """Returns whether this is still its affair."""
        notes, draw = self._notes, self._notes.world.draw
        for number, offset, id in messages:
            notes.note("handled", self._me, id, group=self._group.name)
            at[number] = offset + 1
        if self._group.slow_s:
            await asyncio.sleep(self._group.slow_s * draw.random())
        taken = await self._commit({number: at[number] for number, _, _ in messages})
        for _, _, id in messages:
            notes.note("settled" if taken else "gone", self._me, id, group=self._group.name)
        return taken

    async def _commit(self, ends: dict[int, int]) -> bool:
        """Ask until it is known whether it was taken."""
        wanted = [
            {"partition_index": number, "committed_offset": offset, "committed_leader_epoch": -1,
             "committed_metadata": ""}
            for number, offset in ends.items()
        ]  # fmt: skip
        while True:
            sent_at = self._notes.world.now_ns
            try:
                wire = self._wire or await self._coordinator()
                found = await wire.ask(
                    _COMMIT, group_id=self._group.name, generation_id_or_member_epoch=self._generation,
                    member_id=self._id, group_instance_id=None,
                    topics=[{"name": TOPIC, "partitions": wanted}],
                )  # fmt: skip
            except (*_LOST, _RefusedError):
                self._wire = None
                await asyncio.sleep(0.05)
                continue
            codes = {int(one.error_code) for topic in found.topics for one in topic.partitions}
            if codes == {0}:
                self._note_committed(sent_at, ends)
                return True
            if codes & {*_LEFT_BEHIND}:
                self._notes.world.trace(f"commit refused: {codes}")
                return False
            self._wire = None
            await asyncio.sleep(0.05)

    def _note_committed(self, sent_at: int, ends: dict[int, int]) -> None:
        """As of when it was asked for: a member of a later generation asks later, but may be told sooner."""
        for number, offset in ends.items():
            event = Event(
                sent_at, "committed", self._me, topic=TOPIC, group=self._group.name, partition=number,
                offset=offset,
            )  # fmt: skip
            self._notes.events.append(event)
            self._notes.world.trace(f"committed {number}:{offset}")


def _subscription() -> bytes:
    """Version, topics, no data of its own, and no partitions that it has."""
    name = TOPIC.encode()
    return struct.pack(f">hih{len(name)}sii", 1, 1, len(name), name, -1, 0)


_SUBSCRIPTION = _subscription()


def _messages(data: bytes) -> Iterator[tuple[int, str]]:
    at = 0
    while at < len(data):
        base, size = struct.unpack_from(">qi", data, at)
        count = int.from_bytes(data[at + 23 : at + 27]) + 1
        for one in stored_records(StoredBatch(base, count, 0, data[at : at + 12 + size])):
            yield one.offset, (one.value or b"").decode()
        at += 12 + size
