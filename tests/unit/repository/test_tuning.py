"""Where constants of time are: heuristics in `config.Tuning`, promises in `config.Limits`, and nowhere else.

Works on the source text, as `test_architecture` does. What is found is a number: a name that ends in its unit
(`_FRESH_S = 1.0`), one that is given to something that waits (`sleep(0.1)`, `timeout=5`), and a schedule of
pauses. What is neither heuristic nor promise is listed here, with the reason.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

import postroom
from postroom.config import DEFAULTS, Limits, Tuning
from tests.tuned import Tune, tuned

SOURCE = Path(postroom.__file__).parent
# where they belong; and the suite for stores, which is a test
HOMES = ("config.py", "testing/store_contract/")

ALLOWED = {
    "backoff.py:SOON": "the schedules of pauses themselves: every room names one of them",
    "backoff.py:STEADY": "the same",
    "backoff.py:SLOW": "the same",
    "backoff.py:STUCK": "the same",
    "backoff.py:ROUTE": "the same",
    "broker/access.py:_MINUTE_S": "a unit: the log says “in the last minute”",
    "broker/topology/topics.py:_MINUTE_S": "a unit: the error says “within a minute”",
    "broker/metrics.py:BOUNDS_S": "the buckets of a histogram, which dashboards know",
    "broker/metrics.py:WAIT_BOUNDS_S": "the buckets of a histogram, which dashboards know",
    "client/app/figures.py:BOUNDS_S": "the buckets of a histogram, which dashboards know",
    "clock.py:FURTHEST_MS": "all processes on a file follow its clock by one rule (I26)",
    "clock.py:STEP_MS": "the same",
    "http/failures.py:_RETRY_AFTER_S": "what answers tell clients, by status",
    "kafka/produce.py:_LONGEST_MS": "a bound of what Kafka clients may ask for",
    "kafka/reading.py:_LONGEST_WAIT_MS": "the same",
    "model/delivery/delivery.py:_MOMENT_MS": "part of a decision of the model, on stored values (I6)",
    "model/messages/timestamps.py:_DAY_MS": "a unit",
    "model/messages/timestamps.py:FIRST_SHOWN_MS": "a bound of the calendar",
    "model/messages/timestamps.py:LAST_SHOWN_MS": "a bound of the calendar",
    "model/messages/timestamps.py:_LIKELY_MS": "a date: 1980",
    "model/policy/bounds.py:MOST_MOMENTS_MS": "a bound of the calendar",
    "model/policy/recurrence.py:_HOUR_MS": "a unit",
    "model/policy/recurrence.py:_DAY_MS": "a unit",
    "model/policy/recurrence.py:_LOOKS_MS": "an hour, a day, a month, a year: how a calendar is searched",
    "model/policy/slow_lane.py:_QUIET_MS": "a bound of what users may set, and a decision of the model on it",
    "tasks.py:_AGAIN_SECONDS": "goes round a fault of Python 3.11, and no test wants another",
    "units.py:_UNIT_MS": "units",
    "units.py:_LONGEST_MS": "a bound: sums of a few still fit into 64 bits",
}

_TIMED = re.compile(r"_?[A-Z][A-Z_0-9]*_(S|MS|SECONDS)")
_RATE = re.compile(r".*_PER_(S|MS)")  # so many a second: an amount, not a time
_WAITS = {"sleep", "wait", "wait_for", "join", "timeout", "call_later", "Pauses"}
_NAMED = re.compile(r".*(timeout|wait|patience|interval|delay)(_s|_ms|_seconds)?")


def timing_constants(root: Path) -> Iterator[str]:
    """Yields `file:name` of constants of time, and `file:line call` of numbers that are waited for."""
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if not file.startswith(HOMES):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from (f"{file}:{name}" for name in _named(tree))
            yield from (f"{file}:{found}" for found in _inline(tree))


def _named(tree: ast.Module) -> Iterator[str]:
    """Constants of modules and classes."""
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for statement in (statement for body in bodies for statement in body):
        match statement:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                targets = [target]
            case _:
                continue
        names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        if any(map(_number, ast.walk(value))):
            pauses = isinstance(value, ast.Call) and _called(value) == "Pauses"
            yield from (n for n in names if pauses or (_TIMED.fullmatch(n) and not _RATE.fullmatch(n)))


def _inline(tree: ast.Module) -> Iterator[str]:
    """Numbers that are given to what waits; 0 is no time. What a constant is made of is found by its name."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = _called(call)
        given = list(call.args) if name in _WAITS - {"Pauses"} else []
        given += [word.value for word in call.keywords if word.arg and _NAMED.fullmatch(word.arg)]
        if any(isinstance(one, ast.Constant) and _number(one) and one.value for one in given):
            yield f"{call.lineno} {name}"


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


@pytest.fixture(scope="module")
def here() -> list[str]:
    return list(timing_constants(SOURCE))


def test_constants_of_time_are_in_one_place(here: list[str]) -> None:
    found = [one for one in here if one not in ALLOWED]
    assert not found, "move these to config.Tuning (heuristics) or config.Limits (promises)"


def test_every_exception_is_still_there(here: list[str]) -> None:
    assert set(ALLOWED) <= set(here)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("_FRESH_S = 1.0", ["a.py:_FRESH_S"]),
        ("LOOK_MS: int = 5 * 60_000", ["a.py:LOOK_MS"]),
        ("_FIRST_S, _LAST_S = 1, 2", ["a.py:_FIRST_S", "a.py:_LAST_S"]),
        ("class A:\n    EACH_S = 0.003", ["a.py:EACH_S"]),
        ("_PAUSES = Pauses(0.1, 2.0)", ["a.py:_PAUSES"]),
        ("def f():\n    time.sleep(0.1)", ["a.py:2 sleep"]),
        ("thread.join(timeout=5)", ["a.py:1 join"]),
        ("open(timeout_ms=3_000)", ["a.py:1 open"]),
        ("_MOST = 100\n_BYTES = 5\nMOST_PER_S = 3\nsleep(0)\nsleep(x)\n', '.join(all)", []),
        ("_FRESH_S = limits.tuning.broker.fresh_s", []),
    ],
)
def test_a_constant_of_time_is_found(tmp_path: Path, source: str, found: list[str]) -> None:
    (tmp_path / "a.py").write_text(textwrap.dedent(source))
    assert list(timing_constants(tmp_path)) == found


def test_every_value_has_its_unit_in_its_name() -> None:
    for room in fields(Tuning):
        part = getattr(DEFAULTS.tuning, room.name)
        assert is_dataclass(part)
        names = [field.name for field in fields(part)]
        assert names and not [n for n in names if not re.fullmatch(r"\w+_(s|ms|per_ms|pauses)", n)]


def test_limits_carry_their_tuning() -> None:
    quick = tuned(wire={"tick_s": 0.05}, store={"skew_ms": 1})
    assert (quick.tuning.wire.tick_s, quick.tuning.store.skew_ms) == (0.05, 1)
    assert quick.tuning.broker is DEFAULTS.tuning.broker
    assert replace(quick, partitions=1).tuning is quick.tuning
    assert Limits() == DEFAULTS != quick


def test_defaults_that_a_test_changed_are_as_before(tune: Tune) -> None:
    tune(wire={"tick_s": 0.5})
    tune(wire={"tick_s": 0.25, "enter_s": 0.1})
    assert (DEFAULTS.tuning.wire.tick_s, DEFAULTS.tuning.wire.enter_s) == (0.25, 0.1)
    with pytest.raises(AttributeError):
        tune(wire={"tock_s": 1})


def test_the_test_before_has_left_nothing() -> None:
    assert DEFAULTS.tuning == Tuning()
