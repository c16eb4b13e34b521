"""A consuming process to be killed: notes each message it handled, then acks.

    python consumer_process.py URL TOPIC GROUP NOTES

Acks one by one, by list, or up to a message, at random; hands some back, so that deliveries have holes.
"""

import asyncio
import os
import random
import sys

import penstock


async def main(url: str, topic: str, group: str, notes: str) -> None:
    noted = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    async with (
        penstock.connect(url) as mq,
        mq.consumer(topic, group=group, window=random.choice([50, 400])) as consumer,
    ):
        while True:
            messages = await consumer.poll(max_messages=random.choice([1, 10, 100]), wait=1)
            back = [m for m in messages if m.attempt < 3 and random.random() < 0.02]
            done = [m for m in messages if m not in back]
            os.write(noted, "".join(f"{m.value.decode()}\n" for m in done).encode())
            try:
                for message in back:
                    await (message.retry(delay=0.05) if random.random() < 0.5 else message.release())
                if len(done) == 1:
                    await done[0].ack()
                elif done:
                    await consumer.ack(done)
            except penstock.LeaseLost:
                pass  # somebody else has it now: it is handled again there


asyncio.run(main(*sys.argv[1:]))
