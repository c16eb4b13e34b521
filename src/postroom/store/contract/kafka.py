"""The store contract for consumer groups of Kafka clients: who coordinates them, and what they committed.

All of it is kept on the first shard. A group has a row, with the lease of the broker that coordinates it and
its last complete generation, and an offset for each partition of a topic as Kafka clients count them. A
group's name is any text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from ...model.frozen import dataclass
from ...model.kafka_group import Generation, GroupError, Who

__all__ = ["KafkaGroup", "KafkaGroups", "KafkaOffset", "Positions", "ShareGroup"]

Positions = dict[int, dict[str, dict[int, int]]]
"""By topic, group and Kafka partition: the offset that the group goes on with."""


@dataclass(frozen=True, slots=True)
class KafkaGroup:
    name: str
    generation: Generation
    holder: str  # the broker that coordinates it; "": none
    until: int  # its lease ends then; of a group without a holder, when it was last used

    def is_live(self, now_ms: int) -> bool:
        """Whether members may be at work: each has to be heard of within its session."""
        return bool(self.generation.members) and now_ms < self.until + self.generation.session_ms


@dataclass(frozen=True, slots=True)
class KafkaOffset:
    topic_id: int
    partition: int  # as Kafka clients count them
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    committed_at: int = 0  # set by the store


@dataclass(frozen=True, slots=True)
class ShareGroup:
    """A share group, as Kafka clients call it; on each topic it is a group in mode "shared"."""

    name: str
    configs: dict[str, str]  # what was set


class KafkaGroups(Protocol):
    def take(self, name: str, holder: str, lease_ms: int, *, make: bool = False) -> KafkaGroup | None:
        """Coordinate the group from now on, flushed; `make` it if it is not there, else None.

        If another broker's lease has not passed, it is returned as it is, with that one's name.
        """

    def renew(self, holder: str, lease_ms: int) -> set[str]:
        """Renew all leases of a broker; returns the groups that it coordinates."""

    def release(self, holder: str, names: Collection[str] | None = None) -> None:
        """End the leases of a broker on these groups, or all; those that never came to be are forgotten."""

    def write(self, name: str, holder: str, generation: Generation) -> bool:
        """Write down a generation that is complete, flushed. False: another broker coordinates the group."""

    def commit(self, name: str, holder: str, who: Who, offsets: Sequence[KafkaOffset]) -> GroupError:
        """Commit offsets, if who does so is of the generation that is written down (I28).

        Checked in the transaction that writes. NOT_COORDINATOR if the group is not this broker's. Need not be
        flushed (I8).
        """

    def offsets(self, name: str) -> list[KafkaOffset]:
        """Return what the group has committed, of all topics."""

    def group(self, name: str) -> KafkaGroup | None: ...

    def groups(self) -> list[KafkaGroup]:
        """By name."""

    def topics(self) -> dict[str, set[int]]:
        """Return by group the topics in which it has committed something, in one read."""

    def positions(self, topic_ids: Collection[int] | None = None) -> Positions:
        """Return where groups are in these topics, or in all, in one read."""

    def put(self, name: str, offsets: Sequence[KafkaOffset], *, force: bool = False) -> bool:
        """Set offsets by hand, flushed. False, and nothing is set, if the group has live members.

        `force`: then it is emptied. Whoever commits or coordinates after that is refused, and begins anew.
        """

    def drop(
        self,
        name: str,
        topic_id: int | None = None,
        partitions: Collection[int] | None = None,
        *,
        force: bool = False,
    ) -> bool:
        """Forget offsets, and with the last of them the group, flushed.

        False, and nothing is forgotten, if the group has live members; but with partitions of a topic it is
        not asked. `force` as above.
        """  # fmt: skip

    def expire(self, idle_ms: int, topic_ids: Collection[int]) -> list[str]:
        """Forget groups that nobody has coordinated for so long, and offsets of other topics than these."""

    # share groups

    def share_group(self, name: str) -> ShareGroup | None: ...

    def share_groups(self) -> list[ShareGroup]:
        """By name."""

    def put_share_group(self, group: ShareGroup, most: int) -> bool:
        """Write it down, flushed. False, and it is not: there are as many as there may be."""

    def drop_share_group(self, name: str) -> None: ...
