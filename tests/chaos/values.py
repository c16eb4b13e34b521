"""What the value of a message in these tests says: who sent it, its place in its key, what becomes of it.

A text such as `p0.k3/2/17/ack/0`: key, run of the producer, number, fate, and the moment it is due (0: at
once). Keys belong to one producer each, whose runs follow each other, so that (run, number) is the order in
which the messages of a key were sent.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Fate", "Value", "parse"]

Fate = Literal["ack", "retry", "dead"]
"""Acked; retried twice, then acked; or sent to the dead letters."""


class Value(NamedTuple):
    key: str
    run: int
    number: int
    fate: str
    due_ms: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        return self.run, self.number

    def __str__(self) -> str:
        return f"{self.key}/{self.run}/{self.number}/{self.fate}/{self.due_ms}"


def parse(text: str) -> Value:
    key, run, number, fate, due_ms = text.split("/")
    return Value(key, int(run), int(number), fate, int(due_ms))
