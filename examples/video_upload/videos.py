"""Where uploads are, and how far each is. The web server and the worker share this folder."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

FOLDER = Path(os.environ.get("VIDEOS", "videos"))
URL = os.environ.get("POSTROOM_URL", "sqlite:///videos.db")


def upload_of(video: str) -> Path:
    return FOLDER / f"{video}.upload"


def store(video: str, content: bytes) -> bool:
    """Whole or not at all, and on the disk before anybody is told of it. What is there stays as it is.

    False: another upload has this name, with other bytes.
    """
    FOLDER.mkdir(exist_ok=True)
    part = FOLDER / f"{uuid.uuid4().hex}.part"
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(part, upload_of(video))  # of two at the same time one comes first
    except FileExistsError:
        return upload_of(video).read_bytes() == content
    finally:
        part.unlink()
    return True


def tell(video: str, state: str, **more: object) -> None:
    new = FOLDER / f"{video}.new"
    new.write_text(json.dumps({"id": video, "state": state, **more}))
    new.replace(FOLDER / f"{video}.status")


def status_of(video: str) -> dict[str, object] | None:
    """None: there is no such video. One whose work has not begun has no status yet: it is accepted."""
    try:
        return dict(json.loads((FOLDER / f"{video}.status").read_text()))
    except FileNotFoundError:
        return {"id": video, "state": "accepted"} if upload_of(video).exists() else None
