"""Members enter at once and are renewed together; who left does not come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from postroom.address import parse
from postroom.broker.topology.groups import Members
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.errors import StoreBusy
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import open_store
from postroom.store.contract import Group, Store

LEASE_S = 30


@dataclass
class Scene:
    store: Store
    clock: ManualClock
    group: Group
    used: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = Members(self.store, DEFAULTS, lambda group: self.used.append(group.id))

    def live(self) -> list[str]:
        return [member.name for member in self.store.progress.members(self.group.id)]

    def left_ms(self, name: str) -> int:
        (until,) = (m.until for m in self.store.progress.members(self.group.id) if m.name == name)
        return until - self.clock.now_ms()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    clock = ManualClock()
    store = open_store(parse("memory://"), clock, DEFAULTS)
    store.catalog.create_topic("orders", TopicSettings(), 1)
    found = Scene(store, clock, store.catalog.create_group("orders", "billing", GroupSettings()))
    join, renew = store.progress.join, store.progress.renew_each

    def joined(*args: object) -> None:
        found.calls.append("join")
        join(*args)  # type: ignore[arg-type]

    def renewed(members: Sequence[tuple[int, str, int]]) -> list[tuple[int, str]]:
        found.calls.append(f"renew {len(members)}")
        return renew(members)

    monkeypatch.setattr(store.progress, "join", joined)
    monkeypatch.setattr(store.progress, "renew_each", renewed)
    yield found
    store.close()


def test_most_beats_change_nothing_and_a_member_stays_live(scene: Scene) -> None:
    scene.members.enter(scene.group, "ann", "host")
    for _ in range(30):
        scene.clock.advance(LEASE_S / 3)
        scene.members.heard(scene.group, "ann", "host")
        assert scene.left_ms("ann") >= LEASE_S * 1000
    assert scene.calls == ["join"] + ["renew 1"] * 10


def test_all_that_were_heard_are_renewed_together(scene: Scene) -> None:
    names = [f"m{number}" for number in range(1200)]
    for name in names:
        scene.members.heard(scene.group, name, "host")
    assert scene.calls == ["join"] * 1200
    scene.calls.clear()
    for _ in range(9):
        for part in range(3):
            scene.clock.advance(LEASE_S / 9)
            for name in names[part::3]:
                scene.members.heard(scene.group, name, "host")
    assert len(scene.live()) == 1200
    assert sum(int(call.split()[1]) for call in scene.calls) <= 9 * 1200 / 2
    assert len(scene.calls) <= 9 * 3  # of 10,800 beats


def test_in_an_ordered_group_each_beat_counts(scene: Scene) -> None:
    ordered = scene.store.catalog.create_group("orders", "ledger", GroupSettings(mode="ordered"))
    scene.members.enter(ordered, "ann", "host")
    for _ in range(3):
        scene.clock.advance(LEASE_S / 3)
        scene.members.heard(ordered, "ann", "host")
    assert scene.calls == ["join", "renew 1", "renew 1", "renew 1"]


def test_who_left_does_not_come_back(scene: Scene) -> None:
    for name in ("ann", "bob"):
        scene.members.enter(scene.group, name, "host")
    scene.clock.advance(LEASE_S * 0.7)
    scene.members.heard(scene.group, "bob", "host")
    scene.members.leave(scene.group, "bob")
    scene.clock.advance(LEASE_S * 0.3)
    scene.members.heard(scene.group, "ann", "host")
    assert scene.live() == ["ann"]


def test_who_left_elsewhere_is_not_taken_along(scene: Scene) -> None:
    for name in ("ann", "bob"):
        scene.members.enter(scene.group, name, "host")
    scene.clock.advance(LEASE_S * 0.7)
    scene.members.heard(scene.group, "bob", "host")
    scene.store.progress.leave(scene.group.id, "bob")
    scene.clock.advance(LEASE_S * 0.3)
    scene.members.heard(scene.group, "ann", "host")
    assert scene.live() == ["ann"]
    scene.members.heard(scene.group, "bob", "host")  # it lives after all: a crash had lost it
    assert scene.live() == ["ann", "bob"]


def test_a_member_that_slept_is_entered_again(scene: Scene) -> None:
    scene.members.enter(scene.group, "ann", "host")
    scene.clock.advance(LEASE_S * 10)
    assert scene.live() == []
    scene.members.heard(scene.group, "ann", "host")
    assert scene.live() == ["ann"]


def test_who_is_taken_along_is_live_from_when_it_was_heard(scene: Scene) -> None:
    for name in ("ann", "bob"):
        scene.members.enter(scene.group, name, "host")
    scene.clock.advance(LEASE_S * 0.6)
    scene.members.heard(scene.group, "bob", "host")
    scene.clock.advance(LEASE_S * 0.4)
    scene.members.heard(scene.group, "ann", "host")
    assert scene.left_ms("ann") == 2 * LEASE_S * 1000
    assert scene.left_ms("bob") == 1.6 * LEASE_S * 1000


def test_after_a_failure_the_next_beat_renews(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.members.enter(scene.group, "ann", "host")
    scene.clock.advance(LEASE_S)

    def failing(members: object) -> list[tuple[int, str]]:
        raise StoreBusy("not now")

    with monkeypatch.context() as patched:
        patched.setattr(scene.store.progress, "renew_each", failing)
        with pytest.raises(StoreBusy):
            scene.members.heard(scene.group, "ann", "host")
    scene.members.heard(scene.group, "ann", "host")
    assert scene.left_ms("ann") == 2 * LEASE_S * 1000


def test_groups_that_have_live_members_are_in_use(scene: Scene) -> None:
    scene.members.enter(scene.group, "ann", "host")
    scene.clock.advance(LEASE_S)
    scene.used.clear()
    scene.members.heard(scene.group, "ann", "host")
    assert scene.used == [scene.group.id]
