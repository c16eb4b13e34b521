"""`python -m tests.pins renew [NAME …]`: write the snapshots anew, all or those that are named."""

from __future__ import annotations

import sys

from .pins import PINS, SERVER_PINS
from .snapshots import write

_USAGE = "python -m tests.pins renew [NAME …]; names: " + ", ".join(
    one.file.partition(".")[0] for one in (*PINS, *SERVER_PINS)
)


def main(arguments: list[str]) -> None:
    files = {one.file.partition(".")[0]: one.file for one in (*PINS, *SERVER_PINS)}
    if arguments[:1] != ["renew"] or set(arguments[1:]) - set(files):
        sys.exit(_USAGE)
    wanted = {files[name] for name in arguments[1:] or files}
    for pin in PINS:
        if pin.file in wanted:
            _say(pin.file, write(pin.file, pin.made()))
    for server_pin in SERVER_PINS:
        if server_pin.file in wanted:
            with server_pin.server() as server:
                _say(server_pin.file, write(server_pin.file, server_pin.made(server)))


def _say(file: str, changed: bool) -> None:
    print(f"{file}: {'written' if changed else 'as it was'}")


if __name__ == "__main__":
    main(sys.argv[1:])
