"""A connection of PyMySQL that can do more: prepare statements, run one without waiting, remember columns.

PyMySQL sends text alone, and reads every answer to its end. A lone append as text is parsed by the server
each time, and waited for by a thread. Here it is prepared once, run by one packet with its values as they
are, and whoever reads the socket when there is something to read has the answer in the end (`Sent`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from ssl import SSLWantReadError, SSLWantWriteError
from typing import Any, ClassVar

import pymysql
from pymysql.constants import COMMAND, CR, SERVER_STATUS
from pymysql.protocol import FieldDescriptorPacket, MysqlPacket, OKPacketWrapper

from ...model.policy.bounds import make_room

__all__ = ["MysqlConnection", "Sent"]

_MOST_PREPARED = 100  # statements of a connection: the server has 16,000 for all, unless it is told otherwise
_MOST_COLUMNS = 2_000  # of results, whose descriptions are remembered
_REFUSED = 0  # no statement has that number
_LARGE_BYTES = (1 << 24) - 1  # more is several packets: it is sent as text
_AT_ONCE = 1 << 16
_IN_TRANSACTION = SERVER_STATUS.SERVER_STATUS_IN_TRANS

_EXECUTE = struct.Struct("<BIBI")  # command, statement, no cursor, once
_LENGTH_AND_NUMBER = struct.Struct("<HBB")
_number = struct.Struct("<q").pack
_INT, _BYTES = b"\x08\0", b"\xfc\0"  # types of values: BIGINT and BLOB
_PREPARED = struct.Struct("<xIHH")  # its id, how many columns and parameters are described
_WOULD_WAIT = (BlockingIOError, SSLWantReadError, SSLWantWriteError)


class MysqlConnection(pymysql.connections.Connection):  # type: ignore[misc]
    """Where no certificate is asked for, all connections share what they need for TLS.

    PyMySQL makes it for each, and reads all authorities that the system trusts for it, to trust anybody
    then: 27 ms of CPU, nine tenths of what it takes to connect.
    """

    _trusting: ClassVar[Any] = None
    _closed: bool
    _current_timeout: float | None

    def __init__(self, **address: Any) -> None:
        self._prepared: dict[str, int | None] = {}  # statements that were run, by number where it is known
        self._sent = False  # a statement whose answer has not come
        self._unsent, self._come = memoryview(b""), b""  # of it, and of the answer
        self._columns: dict[bytes, FieldDescriptorPacket] = {}  # as the server describes them
        super().__init__(**address)

    def _create_ssl_ctx(self, asked: dict[str, Any]) -> Any:
        if asked:  # files, which may change
            return super()._create_ssl_ctx(asked)
        if MysqlConnection._trusting is None:
            MysqlConnection._trusting = super()._create_ssl_ctx(asked)
        return MysqlConnection._trusting

    def _read_packet(self, packet_type: type[MysqlPacket] = MysqlPacket) -> MysqlPacket:
        """A column is described in each result again: what reads the same is taken apart once."""
        if packet_type is not FieldDescriptorPacket:
            return super()._read_packet(packet_type)
        said = super()._read_packet().get_all_data()
        known = self._columns.get(said)
        if known is None:
            make_room(self._columns, _MOST_COLUMNS)
            known = self._columns[said] = FieldDescriptorPacket(said, self.encoding)
        return known

    @property
    def patience_s(self) -> float:
        return float(self._read_timeout)

    @property
    def idle(self) -> bool:
        """Return whether it is open, and nothing is under way on it."""
        return self.open and not self._sent and not self.server_status & _IN_TRANSACTION

    def close(self) -> None:
        if self._sent and not self._closed:  # a farewell might have to wait behind it
            self._closed = True
            self._force_close()
        else:
            super().close()

    def prepare(self, sql: str) -> None:
        """Prepare a statement with `?` for its values, unless it is asked for the first time: many are never
        run again. Waits for the server, which may refuse to: then it is not asked again."""
        if sql not in self._prepared:
            self._make_room()
            self._prepared[sql] = None
        elif self._prepared[sql] is None:
            self._prepared[sql] = _REFUSED
            with suppress(pymysql.MySQLError):
                self._prepared[sql] = self._ask_to_prepare(sql)

    def _make_room(self) -> None:
        if len(self._prepared) >= _MOST_PREPARED:
            oldest = self._prepared.pop(next(iter(self._prepared)))
            if oldest:
                self._execute_command(COMMAND.COM_STMT_CLOSE, struct.pack("<I", oldest))

    def _ask_to_prepare(self, sql: str) -> int:
        self._execute_command(COMMAND.COM_STMT_PREPARE, sql)
        answer = self._read_packet().get_all_data()
        number, columns, parameters = _PREPARED.unpack_from(answer)
        for described in (parameters, columns):
            for _ in range(described + 1 if described else 0):  # and the end of them
                self._read_packet()
        return int(number)

    def start(self, sql: str, args: Sequence[int | bytes]) -> bool:
        """Begin to run a statement that is prepared already; return whether it is. `Sent` goes on with it."""
        number = self._prepared.get(sql)
        if not number:
            return False
        packet = execution(number, args)
        if len(packet) > _LARGE_BYTES:
            return False
        self._sock.settimeout(0)
        self._current_timeout = 0  # PyMySQL sets its own again: some versions if this differs, others always
        self._sent, self._unsent, self._come = True, memoryview(packet), b""
        return True

    def flush(self) -> bool:
        """Send what is left, as far as that goes; return whether something still is."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except _WOULD_WAIT:
            return True
        return False

    def has_come(self) -> bool:
        """Take what there is of the answer, without waiting; return whether that is all."""
        try:
            while not _is_whole(self._come):
                came = self._sock.recv(_AT_ONCE)
                if not came:
                    raise pymysql.OperationalError(CR.CR_SERVER_LOST, "the connection is lost")
                self._come += came
        except _WOULD_WAIT:
            return False
        return True

    def answer(self) -> None:
        """Take the answer that has come, or raise the error that it is."""
        packet = MysqlPacket(self._come[4:], self.encoding)
        self._sent = False
        packet.check_error()
        self.server_status = OKPacketWrapper(packet).server_status


class Sent:
    """A statement that was started on a connection. Implements `SentLone`."""

    def __init__(self, connection: MysqlConnection, at: int, otherwise: int) -> None:
        """`otherwise`: the error that says that nothing is written, and that it is undone."""
        self._connection, self._otherwise = connection, otherwise
        self.at, self.patience_s = at, connection.patience_s
        self._socket = int(connection._sock.fileno())  # kept: a connection that is lost has none
        self.unsent = connection.flush()

    def fileno(self) -> int:
        return self._socket

    def answered(self) -> bool:
        self.unsent = self.unsent and self._connection.flush()
        return not self.unsent and self._connection.has_come()

    def stored(self) -> bool:
        try:
            self._connection.answer()
        except pymysql.MySQLError as error:
            # Of any other error it is not known what it left open: the connection is not used again.
            self._connection._sent = error.args[:1] != (self._otherwise,)
            return False
        return True


def execution(number: int, args: Sequence[int | bytes]) -> bytes:
    """Return the packet that runs a prepared statement with these values; none is NULL."""
    head = _EXECUTE.pack(COMMAND.COM_STMT_EXECUTE, number, 0, 1) + _described(tuple(map(type, args)))
    values = b"".join([_counted(arg) if isinstance(arg, bytes) else _number(arg) for arg in args])
    return (len(head) + len(values)).to_bytes(4, "little") + head + values


@lru_cache(maxsize=10)
def _described(types: tuple[type[int | bytes], ...]) -> bytes:
    """Return what is told of the values before they come: none is NULL, and of which types they are."""
    return (
        bytes((len(types) + 7) // 8) + b"\1" + b"".join([_BYTES if one is bytes else _INT for one in types])
    )


def _counted(value: bytes) -> bytes:
    size = len(value)
    if size < 251:
        return bytes((size,)) + value
    if size < 1 << 16:
        return b"\xfc" + size.to_bytes(2, "little") + value
    return b"\xfd" + size.to_bytes(3, "little") + value


def _is_whole(answer: bytes) -> bool:
    return len(answer) >= 4 and len(answer) >= 4 + int.from_bytes(answer[:3], "little")
