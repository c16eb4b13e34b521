"""Who has logged in to the console: sessions in memory, each named by a cookie that no script can read.

Whoever shows a token once gets a cookie for it (HttpOnly, SameSite=Strict), and a second secret that the page
sends along with whatever changes something: a page of another site has neither. The permissions are those
that the principal has now, and a token that was removed ends its sessions. A console that somebody opened on
this machine for itself has no tokens; a key in the address that was printed stands for one, and works once.

Must never keep a token: of a principal the gatekeeper knows the hash. Bounded: the session that was not used
for longest makes room.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any

from ..broker.access import Gatekeeper
from ..config import DEFAULTS, ConsoleTuning
from ..errors import NotAuthenticated, PermissionDenied
from ..http.access import refuse_pages
from ..model.access import ANONYMOUS, Principal

__all__ = ["CSRF", "Login", "SessionLogins", "cookie_name", "read_secret", "set_cookie"]

CSRF = b"x-postroom-csrf"
"""The header that a page sends along with whatever changes something."""

_MOST = 1000  # sessions
_BODY_BYTES = 4096  # of a log-in
_SAFE = ("GET", "HEAD", "OPTIONS")


@dataclass(slots=True)
class Login:
    """One browser that has logged in."""

    principal: Principal
    used_at: float
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)


def cookie_name(scope: Mapping[str, Any]) -> str:
    """Returns the cookie's name: browsers do not tell ports apart, and several brokers may be on one host."""
    port = (scope.get("server") or ("", 0))[1]
    return f"postroom-console-{port or 0}"


class SessionLogins:
    """The log-ins of one broker's console. `key`: what opens it without a token, once; None: nothing does."""

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        *,
        key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        tuning: ConsoleTuning = DEFAULTS.tuning.console,
    ) -> None:
        self._gatekeeper, self._key, self._clock = gatekeeper, key, clock
        self._longest_s = tuning.session_s
        self._sessions: dict[str, Login] = {}  # the one used last is the last
        self.keyed = key is not None

    # ---- in and out ----

    async def log_in(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes], secret: str) -> str:
        """Returns the cookie of a new session for whoever has this token, or the key."""
        refuse_pages(scope, headers, dev=self.keyed)
        if self.keyed:
            principal = self._by_key(secret)
        else:
            principal = await self._gatekeeper.authenticate(secret or "-", peer_is_loopback=False)
        if len(self._sessions) >= _MOST:
            del self._sessions[next(iter(self._sessions))]
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = Login(principal, self._clock())
        return cookie

    def _by_key(self, secret: str) -> Principal:
        if self._key is None or not hmac.compare_digest(secret.encode(), self._key.encode()):
            raise NotAuthenticated(
                "this console was opened for one browser: run `postroom console` again for another address"
            )
        self._key = None  # whoever reads the address in a history or a list of processes comes too late
        return ANONYMOUS

    def log_out(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> None:
        self._sessions.pop(self._cookie(scope, headers) or "", None)

    # ---- who asks ----

    def found(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Login | None:
        """Returns the session of a request; None: there is none, or it has ended."""
        cookie = self._cookie(scope, headers)
        session = None if cookie is None else self._sessions.pop(cookie, None)
        if cookie is None or session is None or self._clock() - session.used_at > self._longest_s:
            return None
        session.used_at = self._clock()
        self._sessions[cookie] = session
        return session

    async def principal(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Principal | None:
        session = self.found(scope, headers)
        if session is None:
            return None
        refuse_pages(scope, headers, dev=session.principal is ANONYMOUS)
        if scope["method"] not in _SAFE:
            sent = headers.get(CSRF, b"")
            if not hmac.compare_digest(sent, session.csrf.encode()):
                raise PermissionDenied("this page is out of date, or is not the console's: load it again")
        try:
            session.principal = await self._gatekeeper.current(session.principal)
        except NotAuthenticated:
            self.log_out(scope, headers)
            raise
        return session.principal

    @staticmethod
    def _cookie(scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> str | None:
        try:
            found = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(cookie_name(scope))
        except CookieError:
            return None
        return None if found is None else found.value


def set_cookie(scope: Mapping[str, Any], value: str, *, ends: bool = False) -> str:
    """Returns the header that gives a browser its cookie, or takes it away."""
    secure = "; Secure" if scope.get("scheme") == "https" else ""
    age = "; Max-Age=0" if ends else ""
    return f"{cookie_name(scope)}={value}; Path=/; HttpOnly; SameSite=Strict{secure}{age}"


async def read_secret(receive: Callable[[], Any], tuning: ConsoleTuning) -> bytes:
    """Returns the body of a log-in: a small one, and soon, since nobody knows yet who sends it."""
    body = b""
    try:
        async with asyncio.timeout(tuning.login_s):
            while True:
                message = await receive()
                body += bytes(message.get("body", b""))
                if len(body) > _BODY_BYTES or message["type"] != "http.request":
                    raise NotAuthenticated("that is no token: it is pst_… and 43 characters more")
                if not message.get("more_body", False):
                    return body
    except TimeoutError:
        raise NotAuthenticated("the log-in did not arrive in time: try again") from None
