"""What a storm was and what became of it: always the same fields, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["Judged", "Report"]


@dataclass(frozen=True)
class Judged:
    """One topic, or one group of it."""

    name: str
    confirmed: int
    handled: int  # or stored
    faults: dict[str, int]  # by kind
    examples: list[str]
    excused: dict[str, int]  # repeats that have a reason, by reason


@dataclass
class Report:
    store: str
    seed: int
    began: str
    seconds: float
    disk: str  # how it was slowed
    strikes: dict[str, int] = field(default_factory=dict)
    killed: dict[str, int] = field(default_factory=dict)  # processes, by role
    route_changes: int = 0
    confirmed: int = 0
    settled: int = 0
    slowest: tuple[float, str] = (0.0, "-")  # recovery: seconds, after what
    drained_s: float = 0.0
    judged: list[Judged] = field(default_factory=list)
    missed: dict[str, int] = field(default_factory=dict)  # by broadcast member
    broken: str = ""  # why it ended early

    @property
    def clean(self) -> bool:
        return not self.broken and not self.missed and not any(one.faults for one in self.judged)

    def count(self, *kinds: str) -> int:
        """Return how many faults of these kinds there are."""
        return sum(one.faults.get(kind, 0) for one in self.judged for kind in kinds)

    @property
    def restarts(self) -> int:
        return sum(self.strikes.get(f"{verb} the database", 0) for verb in ("restart", "crash"))

    def json(self) -> str:
        """Return all of it; `figures` are those that are compared from week to week."""
        return json.dumps({"figures": self.figures(), **asdict(self)}, indent=1)

    def figures(self) -> dict[str, object]:
        """Return one line of a table."""
        return {
            "store": self.store,
            "minutes": round(self.seconds / 60, 1),
            "seed": self.seed,
            "kills": sum(self.killed.values()),
            "restarts": self.restarts,
            "other faults": sum(self.strikes.values()) - self.strikes.get("kill", 0) - self.restarts,
            "route changes": self.route_changes,
            "messages": self.confirmed,
            "lost": self.count("lost", "not stored") + sum(self.missed.values()),
            "out of order": self.count("out of order"),
            "twice without a reason": self.count("repeated", "acked again", "stored twice", "buried twice"),
            "slowest recovery": f"{self.slowest[0]:.1f} s",
        }

    def markdown(self) -> str:
        verdict = "clean" if self.clean else "NOT CLEAN"
        lines = [
            f"# Storm on {self.store}: {verdict}",
            f"{self.began}, {self.seconds:.0f} s, seed {self.seed}, disk slowed: {self.disk}",
            "",
            *_table(self.figures()),
            "",
            f"The slowest recovery was after: {self.slowest[1]}. Drained in {self.drained_s:.1f} s.",
            "",
            "## Faults",
            *_table({**self.strikes, **{f"killed: {role}": count for role, count in self.killed.items()}}),
            "",
            "## Verdicts",
            "| | confirmed | handled | wrong | repeats with a reason |",
            "|---|---|---|---|---|",
            *(
                f"| {j.name} | {j.confirmed} | {j.handled} | {j.faults or 0} | {j.excused} |"
                for j in self.judged
            ),
        ]
        lines += [f"- {one.name}: {example}" for one in self.judged for example in one.examples]
        lines += [f"- missed by {member}: {count}" for member, count in self.missed.items()]
        if self.broken:
            lines += ["", "## Ended early", "```", self.broken, "```"]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> Path:
        """Return the page; the same as JSON is beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / f"storm-{self.store}-{self.seed}.md"
        page.write_text(self.markdown())
        page.with_suffix(".json").write_text(self.json())
        return page


def _table(row: Mapping[str, object]) -> list[str]:
    names, values = (" | ".join(map(str, cells)) for cells in (row.keys(), row.values()))
    return [f"| {names} |", "|" + "---|" * len(row), f"| {values} |"]
