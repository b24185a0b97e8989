"""Real requests over the loopback address."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from glm_grpo.errors import ConfigError
from glm_grpo.gallery import write_gallery
from glm_grpo.gallery.marks import read_marks
from glm_grpo.gallery.server import LOOPBACK, GalleryServer, serve_gallery
from tests.gallery.conftest import StoredRun


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
def served(written: StoredRun) -> Iterator[StoredRun]:
    """The same, without marks before and after."""
    yield written
    written.folder.marks_path.unlink(missing_ok=True)


@pytest.fixture
def port(served: Any) -> Iterator[int]:
    """Where its gallery is served."""
    with GalleryServer(served.folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(
    port: int, address: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=10)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, address, body, headers=named)
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
def test_server_gives_pages_and_pictures_and_has_none_stored(
    address: str, kind: str, served: Any, port: int
) -> None:
    status, headers, content = ask(port, address)
    path = served.folder.path / address.partition("?")[0].lstrip("/").replace("%2D", "-")
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


KITE = "step-000001/kite-0.png"


def put(port: int, mark: Any, *, address: str = "/marks.json", **headers: str) -> int:
    """Send a mark as the page of the gallery does; headers as given instead, "" for none."""
    own = {
        "Host": f"{LOOPBACK}:{port}",
        "Origin": f"http://{LOOPBACK}:{port}",
        "Content_Type": "application/json",
    }
    body = mark if isinstance(mark, bytes) else json.dumps(mark).encode()
    given = {name: value for name, value in (own | headers).items() if value}
    return ask(port, address, "PUT", body, **given)[0]


def test_server_keeps_marks_beside_the_run(served: Any, port: int) -> None:
    status, headers, content = ask(port, "/marks.json")
    assert (status, headers["Content-Type"], json.loads(content)) == (200, "application/json", {})
    assert put(port, {"image": KITE, "verdict": "star"}) == 204
    assert put(port, {"image": KITE}, address="/gallery/index.html") == 404
    assert put(port, {"image": "step-000001/b-0.png", "note": "</script> 🙂"}) == 204
    marks = {
        KITE: {"verdict": "star", "note": ""},
        "step-000001/b-0.png": {"verdict": None, "note": "</script> 🙂"},
    }
    assert json.loads(ask(port, "/marks.json")[2]) == marks
    assert json.loads(served.folder.marks_path.read_bytes()) == marks
    # The pages that are written next have them, also where they are opened from disk.
    write_gallery(served.folder, ())
    assert served.data("run")["marks"][KITE] == {"verdict": "star", "note": ""}
    # One that says nothing takes the mark away, the last one the file.
    assert put(port, {"image": KITE}) == put(port, {"image": "step-000001/b-0.png"}) == 204
    assert not served.folder.marks_path.exists()


def test_server_takes_marks_at_a_time_one_by_one(served: Any, port: int) -> None:
    images = [f"step-000001/{name}-{sample}.png" for name in ("kite", "b") for sample in (0, 1)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda image: put(port, {"image": image, "note": "x"}), images * 3))
    assert found == [204] * 12
    assert set(read_marks(served.folder)) == set(images)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        # Pages of others, whatever they call this server; "null" is a page from disk or a frame.
        ({"Origin": "http://example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "example.org", "Origin": "http://example.org"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost"}, 204),
        # What a browser sends from a foreign page without asking first.
        ({"Content_Type": "text/plain"}, 415),
    ],
)
def test_server_takes_marks_from_its_own_page_alone(
    headers: dict[str, str], status: int, served: Any, port: int
) -> None:
    assert put(port, {"image": KITE, "verdict": "star"}, **headers) == status
    assert served.folder.marks_path.exists() == (status == 204)


@pytest.mark.parametrize(
    ("mark", "status"),
    [
        (b"{", 400),
        ({"image": KITE, "verdict": "maybe"}, 400),
        ({"image": KITE, "note": "x" * 20_000}, 413),
        ({"image": "step-000001/none-0.png", "verdict": "star"}, 400),
        ({"image": "../../outside.png", "verdict": "star"}, 400),
    ],
)
def test_server_stores_no_mark_that_is_none(mark: Any, status: int, served: Any, port: int) -> None:
    assert put(port, mark) == status
    assert not served.folder.marks_path.exists()


def test_server_says_that_marks_are_damaged_and_keeps_them(served: Any, port: int) -> None:
    served.folder.marks_path.write_text("{")
    assert ask(port, "/marks.json")[0] == 500
    assert put(port, {"image": KITE, "verdict": "star"}) == 400
    assert served.folder.marks_path.read_text() == "{"


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


def test_server_listens_on_this_machine_only(served: Any) -> None:
    with GalleryServer(served.folder, 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/gallery/index.html"


def test_serve_gallery_refuses_a_port_in_use(served: Any, port: int) -> None:
    with pytest.raises(ConfigError, match="choose another port, or 0 for any free one"):
        serve_gallery(served.folder, port=port, announce=str)
