"""An HTTP endpoint on loopback that answers as a test tells it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    """A POST that the endpoint got."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """What it answers."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Endpoint:
    """What a test sees of it."""

    url: str
    requests: list[Request] = field(default_factory=list)


@contextmanager
def answering(answer: Callable[[Request], Reply | None], *, to_get: Reply) -> Iterator[Endpoint]:
    """Answers a POST by a function, whose None breaks the connection, and each GET alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(to_get)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = Request(self.path, dict(self.headers), body)
            endpoint.requests.append(request)
            self.reply(answer(request))

        def reply(self, reply: Reply | None) -> None:
            if reply is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        def handle(self) -> None:
            with suppress(ConnectionError):  # whoever asked has given up
                super().handle()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        endpoint = Endpoint(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()


def in_turn(*replies: Reply | None) -> Callable[[Request], Reply | None]:
    """One reply after the other."""
    left = list(replies)
    return lambda request: left.pop(0)
