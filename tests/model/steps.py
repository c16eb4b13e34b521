"""What the machines of deliveries have in common: steps after which a run is over, and movers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from hypothesis.stateful import rule

from postroom.model.delivery.delivery import Delivery

__all__ = ["Mover", "Rule", "guarded", "step"]

Rule = Callable[..., None]


@dataclass
class Mover:
    """Somebody who was told to move a stamped delivery."""

    generation: int
    moving: Delivery


def step(**strategies: Any) -> Callable[[Rule], Rule]:
    """A rule that is guarded."""

    def decorate(function: Rule) -> Rule:
        decorated: Rule = cast("Any", rule(**strategies))(guarded(function))
        return decorated

    return decorate


def guarded(function: Rule) -> Rule:
    """If it fails, the machine is `broken` and the run is over: what is left is not healed."""

    @functools.wraps(function)
    def run(machine: Any, **arguments: Any) -> None:
        machine.broken = True
        function(machine, **arguments)
        machine.broken = False

    return run
