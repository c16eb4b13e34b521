"""Works on uploads, some at a time, and says how far it is.

postroom worker examples.video_upload.worker:app
"""

from __future__ import annotations

import hashlib
import os
import time

import postroom

from .videos import URL, tell, upload_of

SECONDS_EACH = float(os.environ.get("SECONDS_EACH", "2"))

app = postroom.App(URL)


@app.subscribe("videos", group="transcoding", concurrency=2, max_attempts=5, max_handling="12h")
def transcode(video: str, message: postroom.Received) -> None:
    """A plain function: it runs in a thread. Its lease is renewed while it runs, for twelve hours at most.

    If the process is killed, the message comes again, and the work begins anew.
    """
    content = upload_of(video).read_bytes()
    if not content.startswith(b"VIDEO"):
        tell(video, "failed", reason="this is no video")
        raise postroom.Dead("this is no video")  # trying again would not help
    for percent in range(0, 100, 25):
        tell(video, "working", percent=percent, attempt=message.attempt)
        time.sleep(SECONDS_EACH / 4)  # the work
    tell(video, "ready", checksum=hashlib.sha256(content).hexdigest(), bytes=len(content))
