"""A producing process to be killed: sends numbered messages for ever, and notes each confirmed one.

    python producer_process.py URL TOPIC NAME NOTES

A line is written to NOTES (unbuffered, so it survives kill -9) only after the receipt came.
"""

import asyncio
import os
import random
import sys

import penstock


async def main(url: str, topic: str, name: str, notes: str) -> None:
    noted = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = 0
    async with penstock.connect(url) as mq:
        while True:
            values = [f"{name}:{number + i}" for i in range(random.choice([1, 1, 7, 200]))]
            number += len(values)
            if len(values) == 1:
                await mq.send(topic, values[0].encode(), key=values[0])
            else:
                await mq.send_many(topic, [penstock.Message(v.encode(), key=v) for v in values])
            os.write(noted, "".join(f"{v}\n" for v in values).encode())
            await asyncio.sleep(random.random() * 0.01)


asyncio.run(main(*sys.argv[1:]))
