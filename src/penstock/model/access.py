"""Who may do what: principals and their permissions on topics (R48)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "Permission", "Principal"]

Action = Literal["send", "consume", "manage"]


@dataclass(frozen=True, slots=True)
class Permission:
    action: Action
    pattern: str  # of topic names: "orders", "orders.*", "*"


@dataclass(frozen=True, slots=True)
class Principal:
    name: str
    permissions: tuple[Permission, ...]
    created_at: int = 0
