"""A queue as the jobs use it on the driver: the SDK without asyncio, from the options of the data source."""

from __future__ import annotations

from collections.abc import Mapping
from socket import gethostname

from ... import sync
from ...address import parse
from ..options import bad_option, reach_options

__all__ = ["connected"]


def connected(queue: Mapping[str, str]) -> sync.Connection:
    reach = reach_options(queue)
    path = parse(reach.url).path
    if path is not None and not path.exists():  # to connect would make it
        raise bad_option("url", f"there is no file {path} on this machine, {gethostname()}")
    tls = {"true": True, "false": None}.get((reach.tls or "false").lower(), reach.tls)
    return sync.connect(reach.url, token=reach.token, tls=tls, shards=dict(reach.shards) or None)
