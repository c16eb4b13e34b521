"""Uploads that take long to work on: accepted at once (202), with a page that says how far each is.

    uvicorn examples.video_upload.web:web

Who uploads may name the video (`Idempotency-Key`) and upload it again after a time-out: it is worked on once.
Other bytes under the same name are refused (409): what was accepted stays as it is.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Request, Response

import postroom
from postroom.integrations.fastapi import Queue

from .videos import URL, status_of, store


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[dict[str, object]]:
    async with postroom.connect(URL) as mq:
        await mq.create_topic("videos", partitions=2, dedup_window="1d", exist_ok=True)
        yield {"postroom": mq}


web = FastAPI(title="video upload", lifespan=lifespan)


@web.post("/videos", status_code=202)
async def upload(
    request: Request, response: Response, mq: Queue, idempotency_key: Annotated[str | None, Header()] = None
) -> dict[str, object]:
    video = idempotency_key or uuid.uuid4().hex
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", video):
        raise HTTPException(422, "Idempotency-Key: 1 to 64 letters, digits or '-'")
    if not await asyncio.to_thread(store, video, await request.body()):
        raise HTTPException(409, f"{video} was uploaded before, with other bytes: choose another name")
    # The file first, then the message: who reads the message finds the file. If we die in between, the
    # uploader got no answer and uploads again.
    await mq.send("videos", video.encode(), id=video)
    response.headers["Location"] = f"/videos/{video}"
    return {"id": video, "state": "accepted", "status": f"/videos/{video}"}


@web.get("/videos/{video}")
async def status(video: str, response: Response) -> dict[str, object]:
    found = await asyncio.to_thread(status_of, video) if re.fullmatch(r"[A-Za-z0-9-]{1,64}", video) else None
    if found is None:
        raise HTTPException(404, "no such video")
    if found["state"] in ("accepted", "working"):
        response.headers["Retry-After"] = "1"
    return found
