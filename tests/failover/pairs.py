"""A primary, the standby that takes over when it is killed, and the one address that clients know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack

from tests.servers import MariaReplica, PostgresServer, PostgresStandby, Proxy
from tests.servers.server import Server

__all__ = ["MariaPair", "Pair", "PostgresPair"]


class Pair(ABC):
    """`address` leads to the primary, `link` is how the standby follows it: both can be cut."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.primary: Server = self._first()
        self.address = stack.enter_context(Proxy(self.primary.port))
        self.link = stack.enter_context(Proxy(self.primary.port))
        self.standby: Server = self._another()
        self.database = self.primary.create_database()

    @property
    def url(self) -> str:
        return self.primary.url(self.database, port=self.address.port)

    def fail_over(self) -> None:
        """Kill the primary. Returns when the address leads to the next one, which has no standby yet."""
        self.primary.kill()
        self.address.cut()
        self._promote()
        self.address.lead_to(self.standby.port)
        self.primary = self.standby

    def join(self) -> None:
        """Another standby."""
        self.link.lead_to(self.primary.port)
        self.link.heal()
        self.standby = self._another()

    @abstractmethod
    def _first(self) -> Server: ...

    @abstractmethod
    def _another(self) -> Server: ...

    @abstractmethod
    def _promote(self) -> None: ...

    @abstractmethod
    def confirm(self) -> None:
        """From now on commits wait until the standby has them."""

    def part(self) -> None:
        """From now on the standby receives nothing, and the primary goes on without it."""
        self._forgo()
        self.link.refuse()
        self.link.cut()

    @abstractmethod
    def _forgo(self) -> None: ...


class PostgresPair(Pair):
    primary: PostgresServer
    standby: PostgresStandby

    def _first(self) -> PostgresServer:
        return self._stack.enter_context(PostgresServer())

    def _another(self) -> PostgresStandby:
        standby = PostgresStandby.follow(self.primary, primary_port=self.link.port)
        return self._stack.enter_context(standby)

    def _promote(self) -> None:
        self.standby.promote()

    def confirm(self) -> None:
        self.standby.confirmed_by(self.primary)

    def _forgo(self) -> None:
        self.standby.unconfirmed_by(self.primary)


class MariaPair(Pair):
    primary: MariaReplica
    standby: MariaReplica

    def _first(self) -> MariaReplica:
        return self._stack.enter_context(MariaReplica())

    def _another(self) -> MariaReplica:
        return self._stack.enter_context(MariaReplica(self.primary, primary_port=self.link.port))

    def _promote(self) -> None:
        self.standby.promote()

    def confirm(self) -> None:
        self.primary.confirm_by(self.standby)

    def _forgo(self) -> None:
        self.primary.confirm_alone()
