"""Somebody else's SMS gateway, for trying things out: slow, strict, and now and then out of breath.

    python -m examples.sms_gateway.gateway 8025

It takes RATE messages a second and refuses more (429), with the time after which to come again. A number that
is none is refused for good (400). It knows messages by their id, and sends none twice.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

RATE = int(os.environ.get("GATEWAY_RATE", "20"))


class Gateway(BaseHTTPRequestHandler):
    sent: dict[str, str] = {}  # noqa: RUF012 — shared by all requests, as it should be
    refused = 0
    second, taken, lock = 0, 0, Lock()

    def do_POST(self) -> None:
        sms = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self._answer(*self._take(self.headers["Idempotency-Key"], sms))

    def do_GET(self) -> None:
        self._answer(200, {"sent": sorted(self.sent.values()), "refused": Gateway.refused})

    def _take(self, key: str, sms: dict[str, str]) -> tuple[int, dict[str, object]]:
        now = int(time.time())
        if now != Gateway.second:
            Gateway.second, Gateway.taken = now, 0
        Gateway.taken += 1
        if Gateway.taken > RATE:
            Gateway.refused += 1
            return 429, {"retry_after": 1.5}
        if not sms["to"].lstrip("+").isdigit():
            return 400, {"error": f"{sms['to']!r} is no number"}
        self.sent.setdefault(key, sms["to"])
        return 202, {}

    def _answer(self, status: int, body: dict[str, object]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    match sys.argv[1:]:
        case [port] if port.isdecimal():
            ThreadingHTTPServer(("127.0.0.1", int(port)), Gateway).serve_forever()
        case _:
            sys.exit("usage: python -m examples.sms_gateway.gateway PORT")
