"""What the headers of all requests are.

A header has a limit by its kind, so that nobody can make a broker read megabytes before it knows what they
are about. Fields that a newer client adds have room in it.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

__all__ = ["Request"]


class Request(msgspec.Struct, array_like=True):
    """The header of a request."""

    most_bytes: ClassVar[int] = 8 * 1024
