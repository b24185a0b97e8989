"""Serve a run's gallery to browsers on this machine, where no page can be opened from disk.

What is not covered: other machines. There is no password, so no address but the loopback listens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socketserver
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.run.folder import RunFolder

LOOPBACK = "127.0.0.1"
"""The address that only this machine can reach."""

_SERVED = ("gallery", "images")
"""Folders of a run; what else lies there, checkpoints for one, is nothing for a browser."""
_PAGE = "/gallery/index.html"
_OWN_HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
    ".webp": "image/webp",
}

_logger = logging.getLogger(__name__)


def serve_gallery(folder: RunFolder, *, port: int, announce: Callable[[str], None]) -> None:
    """Serve a gallery until Ctrl-C.

    Args:
        folder: The run. Files are read when they are asked for, so a reload shows a new step.
        port: 0 for any that is free.
        announce: Is told the address of the page once requests are taken.

    Raises:
        ConfigError: The port cannot be listened at.
    """
    with GalleryServer(folder, port) as server, contextlib.suppress(KeyboardInterrupt):
        announce(server.url)
        server.serve_forever()


class GalleryServer(ThreadingHTTPServer):
    """Answers with the files of a run's `gallery/` and `images/`, and with nothing else.

    Args:
        folder: The run.
        port: 0 for any that is free.

    Raises:
        ConfigError: The port cannot be listened at.
    """

    def __init__(self, folder: RunFolder, port: int) -> None:
        self._folder = folder
        try:
            # The folder is unused; without one, a request fails where the current folder is gone.
            super().__init__((LOOPBACK, port), partial(_Handler, directory=folder.path))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen at {LOOPBACK} port {port} ({error}); choose another port, or 0 for "
                "any that is free"
            ) from error

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_address[1]}{_PAGE}"

    def open(self, address: str) -> BinaryIO | None:
        """The file at an address such as `/images/step-000001/x-0.png`; None where none is served.

        Neither `..` nor a link leads out of the two folders; one out of the run folder is told.
        """
        parts = unquote(address).split("/")[1:]
        is_plain = all(part and not part.startswith(".") and "\0" not in part for part in parts)
        if not is_plain or parts[:1] not in [[name] for name in _SERVED]:
            return None
        try:
            path = Path(os.path.realpath(self._folder.inside("/".join(parts))))
            is_served = path.is_relative_to(os.path.realpath(self._folder.inside(parts[0])))
            return self._folder.open("/".join(parts)) if is_served else None
        except StorageError as error:
            _logger.warning("%s", error)
            return None
        except OSError:
            # Not there, a folder, or replaced or removed meanwhile.
            return None

    def server_bind(self) -> None:
        """Bind without asking a name server for the host's name, which can take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, unless the browser merely went away."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: GalleryServer

    def send_head(self) -> BinaryIO | None:
        """Answer all but the content: GET sends, and GET and HEAD close, the file returned."""
        # Nothing of the class above looks at a file by its name.
        address = urlsplit(self.path).path
        if not _OWN_HOSTS.fullmatch(self.headers.get("Host", "")):
            # A name that someone else made lead here, so that their page may read the answer.
            self.send_error(HTTPStatus.FORBIDDEN)
        elif address in ("/", "/gallery", "/gallery/"):
            self.send_response(HTTPStatus.FOUND)
            self.send_header("Location", _PAGE)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif (file := self.server.open(address)) is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self.send_response(HTTPStatus.OK)
            kind = _TYPES.get(Path(address).suffix, "application/octet-stream")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            return file
        return None

    def end_headers(self) -> None:
        # The pages grow while the run goes on.
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        _logger.debug(format, *args)
