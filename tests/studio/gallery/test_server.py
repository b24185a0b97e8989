"""Real requests over the loopback address."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from glm_grpo.errors import ConfigError
from glm_grpo.studio.gallery import write_gallery
from glm_grpo.studio.gallery.server import LOOPBACK, GalleryServer, serve_gallery
from tests.studio.gallery.conftest import StoredRun


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, tiny_yaml: str) -> StoredRun:
    """A run with a step, its gallery, and things that are nobody's business."""
    run = StoredRun(tmp_path_factory.mktemp("served") / "run", tiny_yaml)
    run.record_step(1)
    write_gallery(run.folder, ())
    run.folder.checkpoint_dir(1).mkdir(parents=True)
    (run.folder.checkpoint_dir(1) / "policy.safetensors").write_bytes(b"secret")
    (run.folder.path.parent / "outside.png").write_bytes(b"secret")
    (run.folder.images_dir / "link.png").symlink_to(
        run.folder.checkpoint_dir(1) / "policy.safetensors"
    )
    (run.folder.images_dir / ".half.png").write_bytes(b"secret")
    return run


@pytest.fixture
def port(written: StoredRun) -> Iterator[int]:
    """Where its gallery is served."""
    with GalleryServer(written.folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, address: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=10)
    connection.request("GET", address, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.headers), content


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("/gallery/index.html", "text/html; charset=utf-8"),
        ("/gallery/data/run.js", "text/javascript; charset=utf-8"),
        ("/gallery/assets/core.css", "text/css; charset=utf-8"),
        ("/images/step-000001/kite%2D0.png", "image/png"),
    ],
)
def test_server_gives_pages_and_images_and_has_none_stored(
    address: str, kind: str, written: StoredRun, port: int
) -> None:
    status, headers, content = ask(port, address)
    path = written.folder.path / address.partition("?")[0].lstrip("/").replace("%2D", "-")
    assert (status, content) == (200, path.read_bytes())
    assert headers["Content-Type"] == kind
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "address",
    [
        "/checkpoints/step-000001/policy.safetensors",
        "/config.yaml",
        "/gallery/../config.yaml",
        "/gallery/..%2fconfig.yaml",
        "/images/%2e%2e/%2e%2e/outside.png",
        "//etc/passwd",
        "/images/link.png",
        "/images/.half.png",
        # No listing of a folder.
        "/images/",
        "/nowhere",
    ],
)
def test_server_gives_nothing_else(address: str, port: int) -> None:
    status, _, content = ask(port, address)
    assert status == 404
    assert b"secret" not in content
    assert b"root:" not in content


def test_server_leads_to_the_page(port: int) -> None:
    status, headers, _ = ask(port, "/")
    assert (status, headers["Location"]) == (302, "/gallery/index.html")


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:1234", 200), ("example.org", 403), ("localhost.org", 403)],
)
def test_server_refuses_names_that_others_made_lead_here(host: str, status: int, port: int) -> None:
    assert ask(port, "/gallery/data/run.js", Host=host)[0] == status


def test_server_outlives_a_browser_that_goes_away(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection((LOOPBACK, port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.sendall(b"GET /gallery/index.html HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert ask(port, "/gallery/index.html")[0] == 200
    assert capfd.readouterr().err == ""


def test_server_listens_on_this_machine_only(written: StoredRun) -> None:
    with GalleryServer(written.folder, 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/gallery/index.html"


def test_serve_gallery_refuses_a_port_in_use(written: StoredRun, port: int) -> None:
    with pytest.raises(ConfigError, match=f"{port}"):
        serve_gallery(written.folder, port=port, announce=str)
