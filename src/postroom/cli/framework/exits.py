"""How a command ends: the exit codes, and what is said on the way out.

Decides which code an error has and how it is worded: one line for people, one object for scripts, both on
stderr. Must never show a traceback for a `PostroomError`, an interrupt or a closed pipe (`--debug` shows it).
The codes are part of the interface: never change one.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

from ...errors import GroupConflict, PostroomError, UnknownTopic, UsageError

__all__ = [
    "ABORTED",
    "CROSSED",
    "FAILED",
    "INTERRUPTED",
    "OK",
    "USAGE",
    "AbortedError",
    "code_of",
    "leave_closed_pipe",
    "say_error",
    "say_failure",
    "say_note",
]

OK = 0
FAILED = 1
USAGE = 2
CROSSED = 3  # a check that was asked for did not hold
ABORTED = 4
INTERRUPTED = 130

_CALLS = (
    ("pass exist_ok=True if that is fine", "add --exist-ok if that is fine"),
    ("alter_topic changes the rest", "`postroom topic alter` changes the rest"),
    ("split and merge change partitions", "`postroom route split` and `merge` change partitions"),
    ("use alter_group to change it", "use `postroom group alter` to change it"),
    ("or pass force=True:", "or add --force:"),
    ("dead_letters() lists", "`postroom dead list` lists"),
    ("stopped() lists", "`postroom stopped list` lists"),
    ("Move single partitions off it with move()", "`postroom route move` moves single partitions off it"),
    ("or open it again (open_shard)", "or open it again with `postroom shard open`"),
    ("add one, or open one again", "add one with --shard NAME=URL, or open one with `postroom shard open`"),
    ("run `postroom migrate`, or connect with migrate=True", "run `postroom migrate`"),
)

_ALTER_GROUP = re.compile(r"or change the group with alter_group: await .*\)$")
_ALTER_TOPIC = re.compile(r"alter_topic\('([^']+)', dedup_window='10m'\)")
_SHARDS = re.compile(r"connect with shards=\{'([A-Za-z0-9-]+)': [^}]*\} as well")

_RED, _YELLOW, _PLAIN = "\x1b[1;31m", "\x1b[33m", "\x1b[0m"


class AbortedError(Exception):
    """Somebody said no, or nobody could be asked."""

    code = "aborted"


def code_of(error: BaseException) -> int:
    if isinstance(error, AbortedError):
        return ABORTED
    return USAGE if isinstance(error, UsageError) else FAILED


def say_error(code: str, message: str, *, as_json: bool) -> None:
    if as_json:
        line = json.dumps({"error": code, "message": message}, ensure_ascii=False)
    else:
        line = f"{_coloured('error:', _RED)} {' '.join(message.split())}"
    print(line, file=sys.stderr)


def say_note(message: str) -> None:
    """Something worth knowing that is no error; never mixed into what a script reads."""
    print(f"{_coloured('note:', _YELLOW)} {message}", file=sys.stderr)


def say_failure(error: Exception, *, as_json: bool) -> int:
    """Say what went wrong; the exit code."""
    if isinstance(error, PostroomError | AbortedError):
        say_error(error.code, worded(error), as_json=as_json)
    elif isinstance(error, ExceptionGroup):
        return say_failure(error.exceptions[0], as_json=as_json)
    else:
        raise error
    return code_of(error)


def worded(error: Exception | str) -> str:
    """Return what the error says, with the command to type where the SDK names the call to write."""
    text = str(error)
    details = getattr(error, "details", {})
    if isinstance(error, UnknownTopic) and "topic" in details:
        names = " or ".join(details.get("close", ()))
        meant = f"did you mean {names}? Otherwise make it" if names else "make it"
        name, queue = details["topic"], details.get("queue")
        where = f" in {queue}" if queue else ""
        return f"there is no topic {name!r}{where}: {meant} with `postroom topic create {name}`"
    text = _ALTER_TOPIC.sub(r"`postroom topic alter \1 --dedup-window 10m`", text)
    if isinstance(error, GroupConflict):
        text = _ALTER_GROUP.sub(lambda found: _alter_command(details), text)
    for call, typed in _CALLS:
        text = text.replace(call, typed)
    return _SHARDS.sub(r"add --shard \1=URL", text)


def _alter_command(details: dict[str, Any]) -> str:
    """The command that changes what a consumer wants changed."""
    asked = {name: after.strip("'") for name, (_, after) in details.get("differs", {}).items()}
    if "slow_lane" in asked:
        asked["slow_lane"] = "off" if asked["slow_lane"] == "False" else "…"
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in asked.items())
    where = f"{details.get('topic')} {details.get('group')}"
    return f"or change the group with `postroom group alter {where} {options}`"


def leave_closed_pipe() -> int:
    """The reader has seen enough (`| head`): fine. Python must not flush into the closed pipe at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK


def _coloured(text: str, colour: str) -> str:
    plain = os.environ.get("NO_COLOR") or not sys.stderr.isatty()
    return text if plain else f"{colour}{text}{_PLAIN}"
