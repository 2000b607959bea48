"""The page as it is served: to a browser, and to whoever else knocks."""

import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image

from vitlab.app.checkpoints import ModelCache
from vitlab.app.server import HOST, launch, listen
from vitlab.models import ViTConfig, build_model
from vitlab.weights import save_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Gradio's use of pandas

SMALL = ViTConfig(image_size=32, patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=3)


@contextlib.contextmanager
def served(path: Path, **options: Any) -> Iterator[str]:
    """The address of the page over `path` while it is served, by `launch` in a thread that looks up no other host."""
    addresses, servers, hosts, look_up = list[str](), list[uvicorn.Server](), set[Any](), socket.getaddrinfo

    def recorded(host: Any, *args: Any, **options: Any) -> Any:
        hosts.add(host)
        return look_up(host, *args, **options)

    class Server(uvicorn.Server):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            servers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", "")  # put back afterwards
        patch.setenv("GRADIO_ANALYTICS_ENABLED", "")
        patch.setattr(uvicorn, "Server", Server)
        patch.setattr(socket, "getaddrinfo", recorded)
        options |= {"announce": addresses.append, "device": "cpu"}
        thread = threading.Thread(target=launch, args=(path,), kwargs=options, daemon=True)
        thread.start()
        until(lambda: servers and servers[0].started)
        uploads = Path(os.environ["GRADIO_TEMP_DIR"])
        assert uploads.is_dir()
        try:
            yield addresses[0]
        finally:
            servers[0].should_exit = True
            thread.join(60)
        assert not thread.is_alive()
        assert not uploads.exists()
    assert hosts <= {HOST, "localhost"}  # where selenium finds the browser


def until(ready: Callable[[], Any], seconds: float = 200) -> Any:
    """What `ready` returns once that is true."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, one of them broken, one flat; and what is dropped on the page."""
    place = tmp_path_factory.mktemp("app")
    model = build_model(SMALL)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(0))
    save_model(model, place / "models" / "animals", extra={"classes": ["ant", "bee", "cow"]})
    save_model(model, place / "models" / "broken")
    (place / "models" / "broken" / "model.safetensors").write_bytes(b"{")
    save_model(build_model(dataclasses.replace(SMALL, depth=1)), place / "models" / "flat")
    save_model(build_model(dataclasses.replace(SMALL, depth=2)), place / "models" / "low")
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert("CMYK").save(place / "photo.jpg")
    (place / "letter.txt").write_text("Dear all")
    (place / "cut.jpg").write_bytes((place / "photo.jpg").read_bytes()[:2000])
    (place / "huge.png").write_bytes(np.random.default_rng(0).bytes(2**21))
    rows = zlib.compress(bytes(10_000 * (1 + 3 * 10_000)), 1)  # all of its 100 megapixels are there, black
    parts = ((b"IHDR", struct.pack(">IIBBBBB", 10_000, 10_000, 8, 2, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b""))
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    (place / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    assert (place / "bomb.png").stat().st_size == pytest.approx(1.3e6, rel=0.1)
    return place


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder / "models", max_upload_mb=1.5) as found:
        yield found


@pytest.fixture
def page(browser: Any, address: str) -> "Page":
    return Page(browser, address)


class Page:
    """The page in the browser, in the words of the tests."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser = browser
        browser.get("about:blank")
        for kind in ("performance", "browser"):
            browser.get_log(kind)  # of the page before, whose streams have been cut off
        browser.get(address)
        until(lambda: self.all("input[type=file]"))

    def all(self, css: str) -> list[Any]:
        return self.browser.find_elements("css selector", css)

    def text(self, css: str) -> str:
        text = self.browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", css)
        return " ".join(text.split())

    def do(self, css: str, act: Callable[[Any], object], text: str | None = None) -> None:
        """Does something to the first element, or the one of this text, once the page lets it be done: what was found
        may just be drawn anew."""
        from selenium.common.exceptions import ElementClickInterceptedException as Covered
        from selenium.common.exceptions import ElementNotInteractableException as NotYet
        from selenium.common.exceptions import StaleElementReferenceException as Gone

        def done() -> bool:
            with contextlib.suppress(Covered, NotYet, Gone):
                for each in self.all(css):
                    if text is None or each.text.strip() == text:
                        act(each)
                        return True
            return False

        until(done)

    def drop(self, path: Path) -> None:
        """Hands over a file, once the page is ready for one."""
        self.do("#upload input[type=file]", lambda it: it.send_keys(str(path)))

    def choose(self, part: str, option: str) -> None:
        """Picks an option of a list."""
        self.do(f"#{part} input", lambda it: it.click())
        self.do(f"#{part} [role=option]", lambda it: it.click(), option)

    def caption(self) -> str:
        """What the viewer says of the map that it shows."""
        return self.text("#result .stage figcaption")

    def tells(self, css: str, said: str) -> None:
        """Waits until it does."""
        until(lambda: said in self.text(css))

    def shown(self) -> str:
        """The map that the viewer's script has drawn; empty without one."""
        drawn = "const c = document.querySelector('#result canvas:not([hidden])'); return c ? c.toDataURL() : ''"
        return self.browser.execute_script(drawn)

    def refusal(self) -> str:
        return until(lambda: self.text("#message [role=alert]"))

    def requests(self) -> set[str]:
        """Hosts of all requests since the page was asked for."""
        logged = (json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance"))
        urls = [entry["params"]["request"]["url"] for entry in logged if entry["method"] == "Network.requestWillBeSent"]
        assert any(url.endswith(".js") for url in urls)
        return {re.sub(r"^(data|blob):.*|^\w+://([^/:]+).*", r"\1\2", url, flags=re.DOTALL) for url in urls}

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_an_image_and_its_maps_are_shown_without_a_network(page: Page, folder: Path) -> None:
    page.tells("#message", "at most 50 megapixels and 1.5 MB: JPEG, PNG, ")
    page.drop(folder / "photo.jpg")
    rollout = until(page.shown)
    until(lambda: page.text("#message") == "photo.jpg")
    for name in ("ant", "bee", "cow", "80 × 60 pixels were given; the model sees 32 × 32."):
        page.tells("#result", name)
    page.tells("#card", "3 × 2")
    page.do("#result [value=layer]", lambda it: it.click())
    assert page.caption().startswith("Layer 3, mean of 2 heads: highest")
    top = page.shown()
    page.do("#result .layer", lambda it: it.send_keys("\ue012"))  # arrow to the left
    page.do("#result .head", lambda it: it.send_keys("\ue010"))  # end
    assert page.caption().startswith("Layer 2, head 2: highest")
    assert len({rollout, top, page.shown()}) == 3
    loaded = "return [...document.querySelectorAll('.vitlab img')].every(i => i.complete && i.naturalWidth > 3)"
    until(lambda: page.browser.execute_script(loaded))
    assert page.requests() <= {HOST, "data", "blob"}
    assert page.errors() == []


ALLOWED = "Allowed are images of at most 50 megapixels and 1.5 MB."


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_other_files_are_refused_and_the_page_lives_on(page: Page, folder: Path) -> None:
    cases = {
        "letter.txt": "letter.txt: not an image of a known format",
        "bomb.png": "10000 x 10000 pixels, more than the 50,000,000 allowed",
        "cut.jpg": "cut.jpg: corrupt or truncated",
    }
    for name, reason in cases.items():
        page.drop(folder / name)
        until(lambda reason=reason: reason in (said := page.refusal()) and said.endswith(ALLOWED))
        until(lambda: page.text("#result") == "")
    page.drop(folder / "photo.jpg")
    until(page.shown)
    until(lambda: not page.all("#message [role=alert]"))
    assert page.errors() == []


def test_a_large_file_is_refused_before_it_is_sent(page: Page, folder: Path) -> None:
    page.drop(folder / "huge.png")
    reason = r"exceed the maximum allowed size of 1\.5 Mb: .huge\.png"
    until(lambda: re.search(reason, page.text(".toast-body")))  # in one look: it fades
    page.drop(folder / "photo.jpg")
    until(page.shown)


def test_a_broken_checkpoint_is_a_message_and_the_image_stays(page: Page, folder: Path) -> None:
    page.drop(folder / "photo.jpg")
    until(page.shown)
    page.choose("checkpoint", "broken")
    until(lambda: "model.safetensors" in page.refusal())
    until(lambda: page.text("#result") == "")
    page.choose("checkpoint", "animals")
    until(page.shown)
    until(lambda: page.text("#message") == "photo.jpg")
    assert page.errors() == []


def test_the_viewer_follows_the_checkpoint(page: Page, folder: Path) -> None:
    page.drop(folder / "photo.jpg")
    until(page.shown)
    page.do("#result [value=layer]", lambda it: it.click())
    for name, layers in (("low", 2), ("flat", 1), ("animals", 3)):
        before = page.shown()
        page.choose("checkpoint", name)
        page.tells("#card", f"Checkpoint {name}")
        until(lambda layers=layers: page.all(f"#result .layer[max='{layers}']"))
        until(lambda before=before: page.shown() not in ("", before))
        assert page.caption().startswith(("Layer ", "Rollout"))
    assert page.errors() == []


def test_results_come_in_the_order_of_their_requests(page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested, get = threading.Event(), ModelCache.get

    def slowly(cache: ModelCache, name: str) -> Any:
        if name == "low":
            assert requested.wait(60)
            time.sleep(1)
        return get(cache, name)

    monkeypatch.setattr(ModelCache, "get", slowly)
    page.drop(folder / "photo.jpg")
    until(page.shown)
    page.choose("checkpoint", "low")
    page.choose("checkpoint", "flat")
    requested.set()
    page.tells("#card", "Checkpoint flat")
    time.sleep(1)
    page.tells("#card", "Checkpoint flat")
    assert page.all("#result .layer[max='1']")


def ask(address: str, path: str = "/", method: str = "GET", body: bytes = b"", **headers: str) -> tuple[int, str, str]:
    """Status, content security policy and text of an answer."""
    port = int(address.rstrip("/").rpartition(":")[2])
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=60)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("content-security-policy", ""), answer.read().decode()


def test_other_origins_and_endpoints_are_refused(address: str) -> None:
    status, policy, text = ask(address)
    assert (status, "vitlab" in text) == (200, True)
    assert "default-src 'self';" in policy
    assert not re.search(r"https?:|\*", policy)
    assert ask(address, Host="elsewhere.example")[0] == 400
    for origin in ("http://elsewhere.example", "null", "http://127.0.0.1:1"):
        assert ask(address, "/gradio_api/upload", "POST", b"", Origin=origin)[0] == 403
    for path in ("/docs", "/redoc", "/openapi.json", "/monitoring", "/gradio_api/runs", "/gradio_api/mcp"):
        assert ask(address, path)[0] in (403, 404), path
    assert json.loads(ask(address, "/gradio_api/info")[2]) == {"named_endpoints": {}, "unnamed_endpoints": {}}
    assert "googleapis" not in ask(address, "/theme.css")[2] + text
    family = re.search(r"--font: (.*?);", ask(address, "/theme.css")[2])
    assert family is not None
    assert family[1].startswith("system-ui")


@pytest.mark.parametrize(("size", "status"), [(1000, 200), (2**21, 413)])
def test_the_server_limits_the_size_too(address: str, size: int, status: int) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    body = head + bytes(size) + b"\r\n--x--\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=x", "Origin": address.rstrip("/")}
    assert ask(address, "/gradio_api/upload", "POST", body, **kind)[0] == status


def upload(address: str, path: Path) -> str:
    """Where the server put a file."""
    head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{path.name}"\r\n\r\n'.encode()
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    status, _, text = ask(address, "/gradio_api/upload", "POST", head + path.read_bytes() + b"\r\n--x--\r\n", **kind)
    assert status == 200
    return json.loads(text)[0]


def drop(address: str, path: object, session: str = "alone", endpoint: str = "queue/join") -> tuple[int, str]:
    """Status and text of the answer to a file dropped by a raw request, with all events of the queue in it."""
    file = {"path": path, "meta": {"_type": "gradio.FileData"}, "orig_name": "a.png"}
    inputs = [file, "animals"]
    body = json.dumps({"data": inputs, "fn_index": 0, "trigger_id": 1, "session_hash": session}).encode()
    status, _, text = ask(address, f"/gradio_api/{endpoint}", "POST", body, **{"Content-Type": "application/json"})
    if status != 200:
        return status, text
    port = int(address.rstrip("/").rpartition(":")[2])
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=60)) as connection:
        connection.request("GET", f"/gradio_api/queue/data?session_hash={session}")
        events = []
        for line in connection.getresponse():
            events.append(line.decode())
            if '"process_completed"' in events[-1]:
                break
    return status, "".join(events)


def test_an_upload_is_answered_to_a_raw_request(address: str, folder: Path) -> None:
    status, text = drop(address, upload(address, folder / "photo.jpg"))
    assert status == 200
    assert all(name in text for name in ("ant", "bee", "cow", '"success":true'))


def test_only_uploads_are_opened(address: str, folder: Path, tmp_path: Path) -> None:
    uploads = Path(os.environ["GRADIO_TEMP_DIR"])
    (uploads / "out.jpg").symlink_to(folder / "photo.jpg")
    (uploads / "zero.jpg").symlink_to("/dev/zero")
    os.mkfifo(uploads / "pipe.jpg")
    places = [folder / "photo.jpg", "/dev/zero", *(uploads / name for name in ("out.jpg", "zero.jpg", "pipe.jpg"))]
    places += [f"{uploads}/../{folder.name}/photo.jpg", uploads, uploads / "nothing.jpg", "photo.jpg", "a\0b", 7, None]
    places += [f"{address}theme.css", f"file://{folder}/photo.jpg", ["x"], {"path": str(folder / "photo.jpg")}]
    began = time.monotonic()
    for place in places:
        status, text = drop(address, str(place) if isinstance(place, Path) else place)
        assert (status, "data:image" in text) == (403, False), place
    for endpoint in ("api/predict", "run/predict", "call/drop", "component_server", "process_recording", "vibe-edit"):
        assert drop(address, str(folder / "photo.jpg"), endpoint=endpoint)[0] == 404
    assert ask(address, f"/gradio_api/file={folder}/photo.jpg")[0] == 403
    assert ask(address, "/gradio_api/queue/join", "POST", bytes(2**21))[0] == 413
    assert ask(address, "/gradio_api/queue/join", "POST", b"[" * 100_000)[0] == 403
    assert time.monotonic() - began < 20


def test_twenty_requests_at_once_have_twenty_answers(address: str, folder: Path) -> None:
    with ThreadPoolExecutor(20) as pool:
        together = threading.Barrier(20)

        def one(number: int) -> tuple[int, str]:
            place = upload(address, folder / "photo.jpg")
            together.wait(60)
            return drop(address, place, f"session{number}")

        answers = list(pool.map(one, range(20)))
    assert [status for status, _ in answers] == [200] * 20
    assert all('"success":true' in text and "cow" in text for _, text in answers)


def test_ports_are_on_loopback_and_a_taken_one_is_told_of() -> None:
    with listen() as first, listen() as second:
        (host, port), (_, other) = first.getsockname(), second.getsockname()
        assert host == HOST
        assert other != port
        assert min(other, port) >= 7860
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is not available .*; give another"):
            listen(port)
    with listen(port) as again:
        assert again.getsockname() == (HOST, port)
    with pytest.raises(ValueError, match="port 70000"):
        listen(70000)


def test_what_cannot_be_served_is_told_before_anything_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint"):
        launch(tmp_path, announce=pytest.fail)
    with pytest.raises(ValueError, match="the limit of megabytes is -1"):
        launch(tmp_path, max_upload_mb=-1.0, announce=pytest.fail)


@pytest.mark.slow  # all is imported once more
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_stopped_it_leaves_quietly_and_leaves_nothing(folder: Path, tmp_path: Path, sent: int, code: int) -> None:
    program = "import sys; from vitlab.app import launch; launch(sys.argv[1], announce=lambda a: print(a, flush=True))"
    place = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder / "models" / "animals")],
        env=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert ask(address)[0] == 200
        left = [path.name for path in tmp_path.iterdir() if path.name.startswith("vitlab-app-")]
        assert len(left) == 1
        process.send_signal(sent)
        out, err = process.communicate(timeout=200)
    assert (process.returncode, out, err) == (code, "", "")
    assert not (tmp_path / left[0]).exists()
