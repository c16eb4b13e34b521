"""The way of a message through the package: which files a send, a poll and an ack pass, in all threads.

`python -m tests.docs.walks` prints the ways as they are; with `--json` for the test of ARCHITECTURE.md. It is
a program of its own, so that nothing that another test has switched on is on the way.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import postroom

SOURCE = Path(postroom.__file__).parent
ROUNDS = 3  # what is on the way by chance is not there each time

Way = dict[str, str]
"""Files that were passed, below the package, each with the first function that was called there."""


class Tracer:
    """Notes every file of the package in which a function is called, in any thread."""

    def __init__(self) -> None:
        self.way: Way = {}
        self._below = f"{SOURCE}/"

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            if file.startswith(self._below):
                self.way.setdefault(file.removeprefix(self._below), frame.f_code.co_qualname)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Threads that begin inside are traced to their end."""
        before = sys.getprofile()
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before)  # type: ignore[arg-type]

    def taken(self) -> Way:
        """What was passed since it was asked before."""
        way, self.way = self.way, {}
        return way


async def trace(url: str) -> dict[str, list[Way]]:
    """The files of each walk, once for each round; "meanwhile" is a send to a consumer that polls already."""
    tracer, found = Tracer(), defaultdict[str, list[Way]](list)
    with tracer.at_work():
        async with postroom.connect(url) as mq:
            await mq.create_topic("orders", partitions=1)
            await mq.send("orders", b"first", key=b"k")
            for _ in range(ROUNDS):
                tracer.taken()
                await mq.send("orders", b"x", key=b"k")
                found["send"].append(tracer.taken())
            async with mq.consumer("orders", group="billing", start="latest") as consumer:
                await consumer.poll(wait=0.05)
                for _ in range(ROUNDS):
                    await mq.send("orders", b"x", key=b"k")
                    found["meanwhile"].append(tracer.taken())
                    messages = await consumer.poll(wait=5)
                    found["poll"].append(tracer.taken())
                    await consumer.ack(messages)
                    found["ack"].append(tracer.taken())
    return found


def show(ways: dict[str, list[Way]]) -> None:
    for walk, found in ways.items():
        always = set.intersection(*(set(way) for way in found))
        print(f"{walk}: {len(always)} files each time, {len(set[str]().union(*found))} in all")
        for file, function in found[0].items():
            print(f"    {'' if file in always else '? '}{file}  {function}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ways = asyncio.run(trace(f"sqlite:///{folder}/q.db"))
    if "--json" in sys.argv:
        print(json.dumps(ways))
    else:
        show(ways)
