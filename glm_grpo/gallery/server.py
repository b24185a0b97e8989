"""Serve a run's gallery to browsers on this machine, where no page can be opened from disk.

It answers with files of the gallery, and takes one thing: marks of pictures, from its own page.

What is not covered: other machines. There is no password, so no address but the loopback listens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socketserver
import sys
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.gallery.marks import MarkChange, change_mark, read_marks, to_json
from glm_grpo.run.folder import RunFolder

LOOPBACK = "127.0.0.1"
"""The address that only this machine can reach."""

_SERVED = ("gallery", "images")
"""Folders of a run; what else lies there, checkpoints for one, is nothing for a browser."""
_PAGE = "/gallery/index.html"
_MARKS = "/marks.json"
_JSON = "application/json"
_LONGEST_REQUEST = 16_384
"""Bytes of a mark; the longest note takes at most 12,000."""
_TIMEOUT = 30.0
"""Seconds in which a request must arrive, and a connection may wait for the next."""
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
    """Answers with the files of a run's `gallery/` and `images/`, and keeps its marks.

    Args:
        folder: The run.
        port: 0 for any that is free.

    Raises:
        ConfigError: The port cannot be listened at.
    """

    def __init__(self, folder: RunFolder, port: int) -> None:
        self._folder = folder
        self._marking = threading.Lock()
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

        Neither `..` nor a link leads out of the two folders.
        """
        parts = unquote(address).split("/")[1:]
        is_plain = all(part and not part.startswith(".") and "\0" not in part for part in parts)
        if not is_plain or parts[:1] not in [[name] for name in _SERVED]:
            return None
        root, path = ((self._folder.path / name).resolve() for name in (parts[0], "/".join(parts)))
        try:
            return path.open("rb") if path.is_relative_to(root) and path.is_file() else None
        except OSError:
            # Replaced or removed meanwhile.
            return None

    def marks(self) -> bytes:
        """All marks as JSON.

        Raises:
            StorageError: `marks.json` is damaged, or a link that leads out of the run.
        """
        return to_json(read_marks(self._folder))

    def mark(self, change: MarkChange) -> None:
        """Store a mark.

        Raises:
            StorageError: As `change_mark`.
        """
        with self._marking:
            change_mark(self._folder, change)

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
    timeout = _TIMEOUT
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
        elif address == _MARKS:
            self._send_marks()
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

    def _send_marks(self) -> None:
        try:
            content = self.server.marks()
        except StorageError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, error)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", _JSON)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_PUT(self) -> None:
        """Store one mark: JSON of `MarkChange`, from a page of this server alone."""
        host = self.headers.get("Host", "")
        length = self.headers.get("Content-Length", "")
        # A page of someone else's names its own origin, whichever address it was sent to.
        is_own = _OWN_HOSTS.fullmatch(host) and self.headers.get("Origin") == f"http://{host}"
        if not is_own:
            self._refuse(HTTPStatus.FORBIDDEN)
        elif self.path != _MARKS:
            self._refuse(HTTPStatus.NOT_FOUND)
        elif self.headers.get("Content-Type") != _JSON:
            # Any other kind a browser would send for a foreign page without asking first.
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        elif not (length.isascii() and length.isdecimal()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED)
        elif len(length) > len(str(_LONGEST_REQUEST)) or int(length) > _LONGEST_REQUEST:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            self._take_mark(self.rfile.read(int(length)))

    def _take_mark(self, content: bytes) -> None:
        try:
            self.server.mark(MarkChange.model_validate_json(content))
        except (ValidationError, StorageError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, error)
        else:
            self.send_response(HTTPStatus.NO_CONTENT)
            self.end_headers()

    def _refuse(self, status: HTTPStatus, reason: Exception | None = None) -> None:
        """Answer that a request was not followed; what it still holds is not read."""
        if reason is not None:
            _logger.warning("%s", reason)
        self.close_connection = True
        self.send_error(status)

    def end_headers(self) -> None:
        # The pages grow while the run goes on.
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        _logger.debug(format, *args)
