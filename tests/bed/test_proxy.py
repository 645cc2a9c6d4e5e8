"""The proxy harms a connection exactly as it is told. No root needed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from proxy import Proxy


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets; its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve(s: socket.socket) -> None:
        with s:
            s.settimeout(0.1)
            while not over.is_set():
                try:
                    data = s.recv(65536)
                except TimeoutError:
                    continue
                except OSError:
                    return
                if not data:
                    return
                try:
                    s.sendall(data)
                except OSError:
                    return

    def accept() -> None:
        listener.settimeout(0.1)
        while not over.is_set():
            try:
                s, _ = listener.accept()
            except OSError:
                continue
            threading.Thread(target=serve, args=(s,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    yield int(listener.getsockname()[1])
    over.set()
    thread.join(60)
    listener.close()


def read(s: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        piece = s.recv(count - len(got))
        if not piece:
            break
        got += piece
    return got


def test_it_passes_bytes_and_their_end(echo: int) -> None:
    with Proxy(echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port), 30) as s:
        data = bytes(range(256)) * 4000
        threading.Thread(target=s.sendall, args=(data,), daemon=True).start()
        assert read(s, len(data)) == data
        s.shutdown(socket.SHUT_WR)
        assert s.recv(1) == b""
        assert proxy.moved("up") == proxy.moved("down") == len(data)


def test_a_cut_at_a_byte_lets_exactly_so_many_through(echo: int) -> None:
    with Proxy(echo) as proxy:
        proxy.cut_after(1000, "down")
        with socket.create_connection(("127.0.0.1", proxy.port), 30) as s:
            s.sendall(b"x" * 5000)
            got = b""
            with pytest.raises(ConnectionResetError):
                while True:
                    piece = s.recv(4096)
                    assert piece, "a cut is a reset, not an orderly end"
                    got += piece
        assert proxy.moved("down") == 1000 and len(got) <= 1000 and proxy.live == 0


def test_a_cut_now(echo: int) -> None:
    with Proxy(echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port), 30) as s:
        s.sendall(b"hello")
        assert read(s, 5) == b"hello"
        assert proxy.cut() == 1
        with pytest.raises(ConnectionResetError):
            s.recv(1)


def test_a_stall_closes_nothing_and_can_be_lifted(echo: int) -> None:
    with Proxy(echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port), 30) as s:
        proxy.stall_after(10, "up")
        s.sendall(b"a" * 30)
        assert read(s, 10) == b"a" * 10
        s.settimeout(0.4)
        with pytest.raises(TimeoutError):
            s.recv(1)
        assert proxy.live == 1
        proxy.resume()
        s.settimeout(60)
        assert read(s, 20) == b"a" * 20


def test_throttle_and_delay(echo: int) -> None:
    with Proxy(echo) as proxy, socket.create_connection(("127.0.0.1", proxy.port), 30) as s:
        proxy.throttle(20000)
        began = time.monotonic()
        s.sendall(b"b" * 10000)
        assert read(s, 10000) == b"b" * 10000
        assert time.monotonic() - began >= 0.45
        proxy.throttle(None)
        proxy.delay(0.2)
        began = time.monotonic()
        s.sendall(b"c")
        assert read(s, 1) == b"c"
        assert time.monotonic() - began >= 0.4


def test_refusing(echo: int) -> None:
    with Proxy(echo) as proxy:
        proxy.refuse()
        with (
            pytest.raises(ConnectionResetError),
            socket.create_connection(("127.0.0.1", proxy.port), 30) as s,
        ):
            s.sendall(b"x")
            assert s.recv(1), "an orderly end is not a refusal"
        assert proxy.live == 0
