"""What the headers of all requests are."""

from __future__ import annotations

import msgspec

__all__ = ["Request"]


class Request(msgspec.Struct, array_like=True):
    """The header of a request."""
