"""SMS through a gateway that takes so many a second and no more.

    python -m examples.sms_gateway.sms prepare          # once: the topic, the group and its rate
    python -m examples.sms_gateway.sms send +4915112345 "Your parcel is here"
    postroom worker examples.sms_gateway.sms:app

Whoever sends an SMS is done when it is stored. The group's rate is the funnel: all workers together ask the
gateway no more often than it likes. What it refuses all the same comes again when the gateway says.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from contextlib import suppress

import msgspec

import postroom

URL = os.environ.get("POSTROOM_URL", "sqlite:///sms.db")
GATEWAY = os.environ.get("GATEWAY", "http://127.0.0.1:8025")
PER_SECOND = float(os.environ.get("PER_SECOND", "15"))

app = postroom.App(URL)


class Sms(msgspec.Struct):
    to: str
    text: str


@app.subscribe("sms", group="gateway", concurrency=4, max_attempts=10, timeout="30s")
def deliver(sms: Sms, message: postroom.Received) -> None:
    """The message's id goes along: a gateway that heard of it before does not send it again."""
    request = urllib.request.Request(
        GATEWAY,
        json.dumps({"to": sms.to, "text": sms.text}).encode(),
        {"Idempotency-Key": message.id},
    )
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError as refusal:
        answer = json.loads(refusal.read())
        if refusal.code == 429:  # the gateway names the time
            raise postroom.RetryLater(delay=answer["retry_after"], reason="out of breath") from None
        if refusal.code == 400:
            raise postroom.Dead(answer["error"]) from None
        raise  # anything else: again after the back-off


async def prepare() -> None:
    async with postroom.connect(URL) as mq:
        await mq.create_topic("sms", partitions=2, exist_ok=True)
        with suppress(postroom.GroupExists):
            await mq.create_group("sms", "gateway", max_attempts=10)
        await mq.limit_rate(topic="sms", group="gateway", messages_per_s=PER_SECOND)


async def send(numbers: list[str], text: str) -> None:
    async with postroom.connect(URL) as mq:
        bodies = [msgspec.json.encode(Sms(number, text)) for number in numbers]
        await mq.send_many("sms", [postroom.Message(body) for body in bodies])


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case ["prepare"]:
                asyncio.run(prepare())
            case ["send", first, *more, text]:
                asyncio.run(send([first, *more], text))
            case _:
                sys.exit("usage: python -m examples.sms_gateway.sms prepare | send NUMBER … TEXT")
    except postroom.PostroomError as error:
        sys.exit(str(error))
