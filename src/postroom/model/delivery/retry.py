"""When a failed message is tried again.

Decides the delay before the next attempt. Must never read a clock or draw random numbers: the caller adds the
delay to its own time and passes the random fraction. How many attempts there are, and which of them count
(I14), is not decided here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...errors import InvalidSetting
from ...units import Duration, duration_ms

__all__ = ["JITTER", "Backoff"]

JITTER = 0.2
"""At most this part of the delay is added, so that messages that failed together do not return together."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """`Backoff(1, 2, "10m")`: after 1 s, then twice as long each time, up to 10 minutes (and the jitter)."""

    first: Duration = field(default=1, compare=False)
    factor: float = 2
    limit: Duration = field(default="10m", compare=False)
    first_ms: int = field(init=False, repr=False)
    limit_ms: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_ms", duration_ms(self.first, name="Backoff.first"))
        object.__setattr__(self, "limit_ms", duration_ms(self.limit, name="Backoff.limit"))
        factor: object = self.factor
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 1000:
            raise InvalidSetting(
                f"Backoff.factor must be a number from 1 (constant delay) to 1000, such as 2; not {factor!r}",
                name="Backoff.factor",
            )
        if self.limit_ms < self.first_ms:
            raise InvalidSetting(
                f'Backoff.limit must not be below Backoff.first: Backoff(1, 2, "10m"), not {self!r}',
                name="Backoff.limit",
            )

    def delay_ms(self, attempt: int, fraction: float = 0.0) -> int:
        """The wait after `attempt` (from 1) failed; `fraction` in [0, 1) is the caller's random number."""
        if attempt < 1:
            raise ValueError(f"attempts count from 1, not {attempt}")
        if not 0 <= fraction < 1:
            raise ValueError(f"fraction must be in [0, 1), not {fraction}")
        return int(min(self._grown_ms(attempt), self.limit_ms) * (1 + JITTER * fraction))

    def _grown_ms(self, attempt: int) -> float:
        try:
            return self.first_ms * math.pow(self.factor, attempt - 1)
        except OverflowError:
            return self.limit_ms if self.first_ms else 0
