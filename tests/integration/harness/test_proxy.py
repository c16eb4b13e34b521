"""The proxy breaks what it says and nothing else: plain sockets first, then drivers and real servers."""

from __future__ import annotations

import gc
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pymysql
import pytest

from tests.servers import Proxy
from tests.servers.server import Server

DriverError = (psycopg.OperationalError, pymysql.err.OperationalError)


@pytest.fixture
def target() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)
        yield listening


@pytest.fixture
def proxy(target: socket.socket) -> Iterator[Proxy]:
    with Proxy(target.getsockname()[1]) as proxy:
        yield proxy


@pytest.fixture
def ends(proxy: Proxy, target: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of one connection through the proxy: the client's and the server's."""
    with dial(proxy) as client, target.accept()[0] as server:
        server.settimeout(5)
        yield client, server


def dial(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def silent(end: socket.socket, seconds: float = 0.1) -> bool:
    """Nothing to read, not even its end. Only waiting can show that nothing comes."""
    return not select.select([end], [], [], seconds)[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


Ends = tuple[socket.socket, socket.socket]


def test_bytes_go_both_ways(ends: Ends) -> None:
    client, server = ends
    client.sendall(b"ping")
    assert server.recv(10) == b"ping"
    server.sendall(b"pong")
    assert client.recv(10) == b"pong"


def test_a_request_in_two_pieces_is_not_kept_until_the_first_is_acknowledged(ends: Ends) -> None:
    """Drivers write so. Each would take 40 ms, and a database behind the proxy some 10 acks a second."""
    client, server = ends
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as drivers do
    took = sorted(_asked_in_two_pieces(client, server) for _ in range(41))
    assert took[20] < 0.02, took


def _asked_in_two_pieces(client: socket.socket, server: socket.socket) -> float:
    """Seconds until the answer is there; the first piece is through before the second follows."""
    began = time.monotonic()
    client.sendall(b"begin")
    assert server.recv(10) == b"begin"
    client.sendall(b"ask")
    assert server.recv(10) == b"ask"
    server.sendall(b"told")
    assert client.recv(10) == b"told"
    return time.monotonic() - began


def test_more_than_any_buffer_holds_goes_through(ends: Ends) -> None:
    client, server = ends
    data = bytes(range(256)) * 40_000
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.sendall, data)
        received = bytearray()
        while len(received) < len(data):
            received += server.recv(1 << 20)
        sending.result()
    assert received == data


def test_the_end_of_one_direction_leaves_the_other_open(ends: Ends) -> None:
    client, server = ends
    client.shutdown(socket.SHUT_WR)
    assert server.recv(10) == b""
    server.sendall(b"a last word")
    assert client.recv(20) == b"a last word"


def test_what_was_sent_before_a_hang_up_arrives(proxy: Proxy, ends: Ends) -> None:
    """Also when the proxy is done with the connection before anybody has read it."""
    client, server = ends
    length, received = 500_000, 0
    server.sendall(bytes(length))
    server.close()
    client.shutdown(socket.SHUT_WR)
    until(lambda: proxy.connections == 0)
    while more := client.recv(100_000):
        received += len(more)
    assert received == length


def test_when_both_ends_hang_up_the_proxy_forgets_them(proxy: Proxy, ends: Ends) -> None:
    assert proxy.connections == 1
    for end in ends:
        end.close()
    until(lambda: proxy.connections == 0)


def test_cut_resets_both_ends(proxy: Proxy, target: socket.socket, ends: Ends) -> None:
    proxy.cut()
    for end in ends:
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    with dial(proxy) as client, target.accept()[0] as server:
        client.sendall(b"again")
        assert server.recv(10) == b"again"


def test_refuse_leaves_open_connections_alone(proxy: Proxy, target: socket.socket, ends: Ends) -> None:
    client, server = ends
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    client.sendall(b"still here")
    assert server.recv(20) == b"still here"
    proxy.heal()
    with dial(proxy), target.accept()[0]:
        pass


def test_deaf_takes_bytes_and_forwards_them_when_healed(proxy: Proxy, ends: Ends) -> None:
    client, server = ends
    proxy.deaf()
    client.sendall(b"question")
    server.sendall(b"answer")
    assert silent(server) and silent(client)
    proxy.heal()
    assert server.recv(10) == b"question" and client.recv(10) == b"answer"


def test_deaf_hides_a_hang_up(proxy: Proxy, ends: Ends) -> None:
    client, server = ends
    proxy.deaf()
    server.close()
    assert silent(client)
    proxy.heal()
    assert client.recv(1) == b""


def test_a_deaf_proxy_still_takes_connections(proxy: Proxy) -> None:
    """As a server that hangs does: to connect works, and then nothing comes."""
    proxy.deaf()
    with dial(proxy) as client:
        assert silent(client)


def test_deaf_for_answers_lets_requests_through(proxy: Proxy, ends: Ends) -> None:
    client, server = ends
    proxy.deaf("answers")
    client.sendall(b"question")
    assert server.recv(10) == b"question"
    server.sendall(b"answer")
    assert silent(client)


def test_what_a_cut_caught_halfway_never_arrives(proxy: Proxy, ends: Ends) -> None:
    client, server = ends
    proxy.deaf()
    client.sendall(b"lost")
    proxy.cut()
    proxy.heal()
    with pytest.raises(ConnectionResetError):
        server.recv(10)


def test_a_target_that_is_down_looks_like_a_reset(proxy: Proxy, target: socket.socket) -> None:
    target.close()
    with pytest.raises(ConnectionResetError), dial(proxy) as client:  # it may come before dial() returns
        client.recv(1)


def test_closing_ends_everything_also_while_deaf(proxy: Proxy, ends: Ends) -> None:
    client, server = ends
    proxy.deaf()
    client.sendall(b"held back")
    proxy.close()
    proxy.close()
    for end in (client, server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)


def test_closing_while_clients_connect_leaves_none_of_them_behind(target: socket.socket) -> None:
    """Whatever the proxy was doing with them: one that it lost track of would not see a reset."""
    for count in range(20):
        with Proxy(target.getsockname()[1]) as proxy:
            clients = [dial(proxy) for _ in range(count)]
        for client in clients:
            with client, pytest.raises(ConnectionResetError):
                client.recv(1)
    gc.collect()  # one that was lost, on either side, is told of here


# --- in front of real servers --------------------------------------------------------------------------

both = pytest.mark.parametrize("kind", ["postgres", "mariadb"])


@pytest.fixture
def server(kind: str, request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(f"{kind}_server")


@pytest.fixture
def database(server: Server) -> Iterator[str]:
    """With a table `things`."""
    name = server.create_database()
    with closing(server.connect(name)) as connection:
        connection.cursor().execute("CREATE TABLE things (id INTEGER)")
        connection.commit()
    yield name
    server.drop_database(name)


def things(server: Server, database: str) -> list[tuple[Any, ...]]:
    with closing(server.connect(database)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT id FROM things")
        return list(cursor.fetchall())


@both
def test_a_driver_notices_a_cut(server: Server, database: str, proxy_to: Callable[[int], Proxy]) -> None:
    proxy = proxy_to(server.port)
    with closing(server.connect(database, port=proxy.port)) as connection:
        connection.cursor().execute("INSERT INTO things VALUES (1)")
        proxy.cut()
        with pytest.raises(DriverError):
            connection.commit()
    assert things(server, database) == []


@both
def test_the_fate_of_a_commit_is_open_when_its_answer_is_lost(
    server: Server, database: str, proxy_to: Callable[[int], Proxy]
) -> None:
    """I2, R34: the server commits; the client sees nothing but its connection break."""
    proxy = proxy_to(server.port)
    with closing(server.connect(database, port=proxy.port)) as connection, ThreadPoolExecutor(1) as pool:
        connection.cursor().execute("INSERT INTO things VALUES (1)")
        proxy.deaf("answers")
        committing = pool.submit(connection.commit)
        try:
            until(lambda: things(server, database) == [(1,)])
        finally:
            proxy.cut()  # else a failure above would wait for that commit for ever
        with pytest.raises(DriverError):
            committing.result(timeout=10)
