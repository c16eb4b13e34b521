"""Two coordinators and one row: members come, die, are late, and commit; leases run out under either (I28).

The store is the real one, on SQLite in memory; coordinators are the model's groups, written down as a broker
does. Either may lose its lease without knowing, so both believe that they coordinate. The naive truth: a
commit counts if its member got its assignment in the generation that was written last, and a generation that
was written is never written again with other members.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from postroom.model.kafka_group import (
    ClassicGroup,
    Generation,
    GroupError,
    Joined,
    Joining,
    Phase,
    Rules,
    Who,
)
from postroom.store import open_memory
from postroom.store.contract.kafka import KafkaOffset
from postroom.testing.store_contract import MovableClock
from tests.model.examples import examples

NAME, LEASE_MS, SESSION_MS = "billing", 7_000, 10_000
BROKERS = st.sampled_from(["a", "b"])
RANGE = (("range", b""),)


class Client:
    """A consumer: what it was told last."""

    def __init__(self, instance: str | None) -> None:
        self.instance = instance
        self.id, self.generation, self.leads = "", -1, False
        self.members: tuple[str, ...] = ()
        self.assigned: int | None = None  # the generation in which it got its assignment
        self.join_ticket = self.sync_ticket = -1

    @property
    def who(self) -> Who:
        return Who(self.id, self.generation, self.instance)


class TwoCoordinators(RuleBasedStateMachine):
    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.clock = MovableClock()
        self.store = open_memory(clock=self.clock)
        self.groups: dict[str, ClassicGroup] = {}  # in memory, by broker
        self.tickets, self.ids, self.offsets = count(), count(), count(1)
        self.waits: dict[int, Client] = {}
        self.written: dict[int, Generation] = {}
        self.newest = 0
        self.committed = 0

    def teardown(self) -> None:
        self.store.close()

    # ---- as a broker does ----

    def taken(self, broker: str, *, make: bool = False) -> ClassicGroup | None:
        if broker not in self.groups:
            found = self.store.kafka_groups.take(NAME, broker, LEASE_MS, make=make)
            if found is None or found.holder != broker:
                return None
            self.groups[broker] = ClassicGroup(found.generation, self.clock.ms, Rules(300))
        return self.groups[broker]

    def settle(self, broker: str) -> None:
        group = self.groups[broker]
        if group.is_unwritten:
            group.is_unwritten = False
            if not self.store.kafka_groups.write(NAME, broker, group.generation):
                self.drop(broker)
                return
            self.note(group.generation)
        for ticket, reply in group.replies:
            self.tell(ticket, reply)
        group.replies.clear()

    def drop(self, broker: str) -> None:
        for ticket in [*dict(self.groups.pop(broker).replies)]:
            self.waits.pop(ticket, None)

    def note(self, generation: Generation) -> None:
        ids = {one.id for one in generation.members}
        if generation.number in self.written:  # only a static member that is back may stand for itself
            before = self.written[generation.number]
            names = {one.id for one in before.members if one.instance is None}
            assert names == {one.id for one in generation.members if one.instance is None} <= ids
        assert generation.number >= self.newest, "generations do not go back"
        self.newest = generation.number
        self.written[generation.number] = generation

    def tell(self, ticket: int, reply: Any) -> None:
        client = self.waits.pop(ticket, None)
        if client is None:
            return
        if isinstance(reply, Joined):
            if reply.error in (GroupError.NONE, GroupError.MEMBER_ID_REQUIRED):
                client.id = reply.member
            if reply.error is GroupError.NONE:
                client.generation, client.assigned = reply.generation, None
                client.leads = reply.leader == reply.member and not reply.skip_assignment
                client.members = tuple(id for id, _, _ in reply.members)
            elif reply.error in (GroupError.UNKNOWN_MEMBER, GroupError.FENCED_INSTANCE):
                client.id = ""
        elif reply.error is GroupError.NONE:
            client.assigned = client.generation

    # ---- what happens ----

    @rule(target=clients, instance=st.sampled_from([None, None, "one", "two"]))
    def start(self, instance: str | None) -> Client:
        return Client(instance)

    @rule(client=clients, broker=BROKERS, hangs_up=st.booleans())
    def join(self, client: Client, broker: str, hangs_up: bool) -> None:
        group = self.taken(broker, make=True)
        if group is None:
            return
        ticket = next(self.tickets)
        self.waits[ticket] = client
        asked = Joining(client.id, client.instance, "", "", SESSION_MS, 2 * SESSION_MS, "consumer", RANGE)
        group.join(ticket, asked, f"id-{next(self.ids)}", self.clock.ms)
        if hangs_up:
            del self.waits[ticket]
            group.gone(ticket, self.clock.ms)
        self.settle(broker)

    @rule(some=st.lists(clients, min_size=1, max_size=3), broker=BROKERS, late=st.integers(0, 4))
    def gather(self, some: list[Client], broker: str, late: int) -> None:
        """These make a generation, as clients do; of one the answer to its join is lost."""
        for at, client in enumerate(some):
            if not client.id:
                self.join(client, broker, hangs_up=False)
            self.join(client, broker, hangs_up=at == late)
        self.wait(300, renews=False)
        for client in some:
            self.sync(client, broker)

    @rule(client=clients, broker=BROKERS)
    def sync(self, client: Client, broker: str) -> None:
        group = self.taken(broker)
        if group is not None and client.id:
            ticket = next(self.tickets)
            self.waits[ticket] = client
            assignments = dict.fromkeys(client.members, b"x") if client.leads else {}
            group.sync(ticket, client.who, assignments, self.clock.ms)
            self.settle(broker)

    @rule(client=clients, broker=BROKERS)
    def beat(self, client: Client, broker: str) -> None:
        fresh = broker not in self.groups
        group = self.taken(broker)
        if group is None or not client.id:
            return
        error = group.beat(client.who, self.clock.ms)
        if fresh and self.is_in_the_row(client.id):
            assert error is not GroupError.UNKNOWN_MEMBER, "a new coordinator knows the members of the row"
        self.settle(broker)

    @rule(client=clients, broker=BROKERS)
    def leave(self, client: Client, broker: str) -> None:
        group = self.taken(broker)
        if group is not None and client.id:
            if group.leave(Who(client.id, instance=client.instance), self.clock.ms) is GroupError.NONE:
                client.id, client.generation, client.assigned = "", -1, None
            self.settle(broker)

    @rule(client=clients, broker=BROKERS, asks_memory=st.booleans())
    def commit(self, client: Client, broker: str, asks_memory: bool) -> None:
        """`asks_memory`: as a broker does; else by the store alone, as one that stood still in between."""
        group = self.groups.get(broker)
        if asks_memory and (group is None or group.check_commit(client.who, self.clock.ms)):
            return
        offset = next(self.offsets)
        error = self.store.kafka_groups.commit(NAME, broker, client.who, [KafkaOffset(1, 0, offset)])
        if error is not GroupError.NONE:
            return
        self.committed = offset
        assert self.is_holder(broker), "whoever lost the lease commits nothing"
        if client.id:
            assert client.generation == self.newest
            assert client.id in {one.id for one in self.written[self.newest].members}
        else:
            assert not self.row().members

    @rule(broker=BROKERS)
    def die(self, broker: str) -> None:
        """Without a word: its lease runs out, or the next one waits for it."""
        if broker in self.groups:
            self.drop(broker)

    @rule(broker=BROKERS)
    def hand_over(self, broker: str) -> None:
        """The lease goes, and the broker believes that it has it."""
        self.store.kafka_groups.release(broker)

    @rule(ms=st.sampled_from([1, 300, LEASE_MS, SESSION_MS, 2 * SESSION_MS]), renews=st.booleans())
    def wait(self, ms: int, renews: bool) -> None:
        self.clock.ms += ms
        for broker in list(self.groups):
            if renews:
                self.store.kafka_groups.renew(broker, LEASE_MS)
            group = self.groups[broker]
            for _ in range(20):
                if (due := group.due()) is None or due > self.clock.ms:
                    break
                group.tick(self.clock.ms)
                self.settle(broker)
                if broker not in self.groups:
                    break
            else:
                raise AssertionError("time stands still: something is due again and again")

    # ---- what holds ----

    def row(self) -> Generation:
        found = self.store.kafka_groups.group(NAME)
        return Generation() if found is None else found.generation

    def is_holder(self, broker: str) -> bool:
        found = self.store.kafka_groups.group(NAME)
        return found is not None and found.holder == broker

    def is_in_the_row(self, id: str) -> bool:
        return id in {one.id for one in self.row().members}

    @invariant()
    def offsets_are_those_that_were_committed_last(self) -> None:
        found = self.store.kafka_groups.offsets(NAME)
        assert [one.offset for one in found] == ([self.committed] if self.committed else [])

    @invariant()
    def a_group_is_whole(self) -> None:
        for group in self.groups.values():
            members = group.generation.members
            assert (group.phase is Phase.EMPTY) == (not members)
            if group.phase in (Phase.STABLE, Phase.COMPLETING):
                assert group.leader in {one.id for one in members}
            instances = [one.instance for one in members if one.instance is not None]
            assert len(instances) == len({*instances})


TestTwoCoordinators = TwoCoordinators.TestCase
TestTwoCoordinators.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
