"""Serve a run's gallery to browsers on this machine that cannot open pages from disk.

Other machines are not supported. There is no password, so it listens only on the loopback address.
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

from glm_grpo.errors import ConfigError
from glm_grpo.run.folder import RunFolder

LOOPBACK = "127.0.0.1"
"""Address that only this machine can reach."""

_SERVED = ("gallery", "images")
"""Folders of a run that are served; others, such as checkpoints, are of no use to a browser."""
_PAGE = "/gallery/index.html"
_TIMEOUT = 30.0
"""Seconds within which a request must arrive, and that an idle connection is kept open."""
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
        folder: Run folder. Files are read on request, so that reloading a page shows new steps.
        port: Port; 0: any free port.
        announce: Called with the address of the page when requests are accepted.
    """
    with GalleryServer(folder, port) as server, contextlib.suppress(KeyboardInterrupt):
        announce(server.url)
        server.serve_forever()


class GalleryServer(ThreadingHTTPServer):
    """Serves the files of a run's `gallery/` and `images/`.

    Args:
        port: Port; 0: any free port.

    Raises:
        ConfigError: The server cannot listen at the port.
    """

    def __init__(self, folder: RunFolder, port: int) -> None:
        self._folder = folder
        try:
            # The folder is unused, but without it a request fails if the working directory is gone.
            super().__init__((LOOPBACK, port), partial(_Handler, directory=folder.path))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen on {LOOPBACK} port {port} ({error}); choose another port, or 0 for "
                "any free one"
            ) from error

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{LOOPBACK}:{self.server_address[1]}{_PAGE}"

    def open(self, address: str) -> BinaryIO | None:
        """Open the file at an address such as `/images/step-000001/x-0.png`; None if not served.

        Neither `..` nor a link leads outside the two folders.
        """
        parts = unquote(address).split("/")[1:]
        is_plain = all(part and not part.startswith(".") and "\0" not in part for part in parts)
        if not is_plain or parts[:1] not in [[name] for name in _SERVED]:
            return None
        root, path = ((self._folder.path / name).resolve() for name in (parts[0], "/".join(parts)))
        try:
            return path.open("rb") if path.is_relative_to(root) and path.is_file() else None
        except OSError:
            # Replaced or removed in the meantime.
            return None

    def server_bind(self) -> None:
        """Bind without a reverse name look-up of the host, which can be slow."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the browser merely disconnected."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT
    server: GalleryServer

    def send_head(self) -> BinaryIO | None:
        """Send everything but the content; GET sends, and GET and HEAD close, the returned file."""
        # The parent class never looks up a file by its name.
        address = urlsplit(self.path).path
        if not _OWN_HOSTS.fullmatch(self.headers.get("Host", "")):
            # Someone else's domain points here (DNS rebinding), so that their page could read the
            # answer.
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
        # The pages grow while the run continues.
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        _logger.debug(format, *args)
