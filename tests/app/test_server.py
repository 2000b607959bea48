"""The page as it is served: to a browser, and to other clients."""

import contextlib
import dataclasses
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.app import server, session
from vitlab.app.server import HOST, launch, listen
from vitlab.app.session import Session
from vitlab.models import ViTConfig
from vitlab.models.vit import build_model
from vitlab.weights import save_model

SMALL = ViTConfig(image_size=32, patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=3)


def until(ready: Callable[[], Any], seconds: float = 100) -> Any:
    """What `ready` returns once that is true."""
    end = time.monotonic() + seconds
    while not (value := ready()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, one of them corrupt; and files to drop on the page."""
    folder = tmp_path_factory.mktemp("app")
    model = build_model(SMALL)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(0))
    save_model(model, folder / "models" / "animals", extra={"classes": ["ant", "bee", "cow"]})
    save_model(model, folder / "models" / "broken")
    (folder / "models" / "broken" / "model.safetensors").write_bytes(b"{")
    for name, depth in (("flat", 1), ("low", 2)):
        save_model(build_model(dataclasses.replace(SMALL, depth=depth)), folder / "models" / name)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert("CMYK").save(folder / "photo.jpg")
    (folder / "huge.png").write_bytes(bytes(2**21))
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Where `launch` serves the page, in a thread that resolves no host name."""
    addresses, servers, hosts, look_up = list[str](), list[server.Server](), set[Any](), socket.getaddrinfo

    def recorded(host: Any, *args: Any, **options: Any) -> Any:
        hosts.add(host)
        return look_up(host, *args, **options)

    def listening(port: int | None = None) -> server.Server:
        servers.append(listen(port))
        return servers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "listen", listening)
        patch.setattr(socket, "getaddrinfo", recorded)
        for module in (server, session):
            patch.setattr(module, "MAX_BYTES", 2**20)
        options = {"announce": addresses.append, "device": "cpu"}
        thread = threading.Thread(target=launch, args=(folder / "models",), kwargs=options, daemon=True)
        thread.start()
        until(lambda: addresses)
        yield addresses[0]
        servers[0].shutdown()
        thread.join(60)
    assert not thread.is_alive()
    assert hosts <= {HOST, "localhost"}  # where selenium finds the browser


class Page:
    """The page in the browser."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser = browser
        browser.get("about:blank")
        for kind in ("performance", "browser"):
            browser.get_log(kind)  # of earlier pages
        browser.get(address)
        self.shows("#model", "Checkpoint")

    def all(self, css: str) -> list[Any]:
        return self.browser.find_elements("css selector", css)

    def text(self, css: str) -> str:
        text = self.browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", css)
        return " ".join(text.split())

    def shows(self, css: str, words: str) -> None:
        """Waits until it does."""
        until(lambda: words in self.text(css))

    def drop(self, path: Path) -> None:
        self.all("#upload")[0].send_keys(str(path))

    def choose(self, name: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.all("#checkpoint")[0]).select_by_visible_text(name)

    def map(self) -> str:
        """The map that the viewer's script has drawn; empty without one."""
        drawn = "const c = document.querySelector('#result canvas:not([hidden])'); return c ? c.toDataURL() : ''"
        return self.browser.execute_script(drawn)

    def requested_hosts(self) -> set[str]:
        events = (json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance"))
        urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        assert urls
        return {re.sub(r"^(data|blob):.*|^\w+://([^/:]+).*", r"\1\2", url, flags=re.DOTALL) for url in urls}

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def page(browser: Any, address: str) -> Page:
    return Page(browser, address)


def test_an_image_and_its_maps_are_shown_without_a_network(page: Page, folder: Path) -> None:
    page.shows("#message", "Allowed are JPEG, PNG, ")
    page.drop(folder / "photo.jpg")
    rollout = until(page.map)
    page.shows("#message", "photo.jpg")
    for words in ("ant", "bee", "cow", "80 × 60 pixels; the model sees 32 × 32."):
        assert words in page.text("#result")
    page.all("#result [value=layer]")[0].click()
    assert page.text("#result .stage figcaption").startswith("Layer 3, mean of 2 heads: highest")
    mean = page.map()
    page.all("#result .layer")[0].send_keys("\ue012")  # arrow to the left
    page.all("#result .head")[0].send_keys("\ue010")  # end
    assert page.text("#result .stage figcaption").startswith("Layer 2, head 2: highest")
    assert len({rollout, mean, page.map()}) == 3
    loaded = "return [...document.querySelectorAll('img')].every(i => i.complete && i.naturalWidth > 3)"
    until(lambda: page.browser.execute_script(loaded))
    page.all(".examples button")[0].click()
    page.shows("#message", "flower.jpg")
    page.shows("#result", "640 × 427 pixels")
    assert page.requested_hosts() <= {HOST, "data", "blob"}
    assert page.errors() == []


def test_files_and_checkpoints_that_cannot_be_used_are_a_message(page: Page, folder: Path) -> None:
    page.browser.execute_script(  # dropped anywhere
        "const data = new DataTransfer(); data.items.add(new File(['Dear all'], 'letter.txt'));"
        "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}))"
    )
    page.shows("#message [role=alert]", "letter.txt: not an image")
    page.drop(folder / "huge.png")
    page.shows("#message [role=alert]", "more than 1 MiB")
    assert page.text("#result") == ""
    page.drop(folder / "photo.jpg")
    until(page.map)
    page.choose("broken")
    page.shows("#message [role=alert]", "model.safetensors")
    assert page.text("#result") == ""
    for name, layers in (("low", 2), ("animals", 3)):  # the image is shown to another checkpoint
        page.choose(name)
        page.shows("#model", f"Checkpoint {name}")
        until(lambda layers=layers: page.all(f"#result .layer[max='{layers}']"))
        until(page.map)
    assert page.errors() == []


def test_an_earlier_request_does_not_replace_a_later_one(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    requested, load = threading.Event(), Session._load

    def slowly(session: Session, name: str) -> Any:
        if name == "low":
            assert requested.wait(60)
            time.sleep(0.5)
        return load(session, name)

    monkeypatch.setattr(Session, "_load", slowly)
    page.choose("low")
    page.choose("flat")
    requested.set()
    page.shows("#model", "Checkpoint flat")
    time.sleep(1)
    page.shows("#model", "Checkpoint flat")


def request(
    address: str, path: str = "/", method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, str]:
    """Status and text of a response."""
    port = int(address.rstrip("/").rpartition(":")[2])
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=60)) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_other_origins_paths_and_lengths_are_refused(address: str) -> None:
    status, text = request(address)
    assert status == 200
    assert re.search(r"default-src 'none'; img-src data:; .*connect-src 'self'", text)
    origin = address.rstrip("/")
    for headers in ({"Host": "elsewhere.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}):
        assert request(address, **headers)[0] == 403  # pyright: ignore[reportArgumentType]
        assert request(address, "/inspect", "POST", b"", **headers)[0] == 403
    assert request(address, "/inspect?checkpoint=flat", "POST", b"", Origin=origin)[0] == 200
    assert request(address, "/../photo.jpg")[0] == 404
    assert request(address, "/other", "POST", b"")[0] == 404
    assert request(address, "/inspect", "POST", b"", **{"Content-Length": "-1"})[0] == 400
    assert request(address, "/inspect", "POST", b"", **{"Content-Length": "9" * 5000})[0] == 400
    assert request(address, "/inspect", "POST", b"", **{"Content-Length": str(2**40)})[0] == 413


@pytest.mark.parametrize("head", [b"GET / HT", b"POST /inspect HTTP/1.0\r\nHost: %s\r\nContent-Length: 99\r\n\r\n"])
def test_an_upload_that_drips_is_not_waited_for(address: str, monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(server, "UPLOAD_SECONDS", 0.5)
    host = address.rstrip("/").rpartition("//")[2]
    start, received = time.monotonic(), b""
    with socket.create_connection((HOST, int(host.rpartition(":")[2])), timeout=60) as client:
        client.sendall(head.replace(b"%s", host.encode()))
        client.settimeout(0.1)
        while time.monotonic() - start < 20:
            with contextlib.suppress(TimeoutError):
                received += (part := client.recv(2**16))
                if not part:
                    break
            with contextlib.suppress(ConnectionError):
                client.sendall(b"x")
    assert time.monotonic() - start < 10
    assert head.startswith(b"GET") or b" 408 " in received


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1", b"PUT / HTTP/1.1", b"POST http://[/ HTTP/1.1", b"GET /a b c HTTP/1.1"]
)
def test_every_answer_has_the_security_headers(address: str, line: bytes) -> None:
    """Those of Python's own error pages, too."""
    port = int(address.rstrip("/").rpartition(":")[2])
    with socket.create_connection((HOST, port), timeout=60) as connection:
        connection.sendall(line + b"\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n" % port)
        connection.shutdown(socket.SHUT_WR)
        head = b"".join(iter(lambda: connection.recv(2**16), b"")).partition(b"\r\n\r\n")[0]
    for header in (b"Content-Security-Policy:", b"X-Content-Type-Options: nosniff", b"Referrer-Policy: no-referrer"):
        assert head.count(header) == 1


def test_twenty_requests_at_once_have_twenty_answers(address: str, folder: Path) -> None:
    body, start = (folder / "photo.jpg").read_bytes(), threading.Barrier(20)

    def one(number: int) -> tuple[int, str]:
        start.wait(60)
        name = f"{number}.jpg" if number % 4 == 0 else ""
        return request(address, f"/inspect?checkpoint=animals&name={name}", "POST", body)

    with ThreadPoolExecutor(20) as pool:
        for number, (status, text) in enumerate(pool.map(one, range(20))):
            assert (status, "cow" in text) == (200, number % 4 == 0)


def test_ports_are_on_loopback_and_one_in_use_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a checkpoint none is announced."""
    with listen() as first, listen() as second:
        assert first.server_address[0] == "127.0.0.1"
        assert 7860 <= first.server_port != second.server_port
        port = first.server_port
        with pytest.raises(ValueError, match=f"port {port}"):
            listen(port)
    with listen(port) as again:
        assert again.server_port == port
        for error in (BrokenPipeError("gone"), KeyError("a bug")):  # a browser that leaves is no error
            try:
                raise error
            except (BrokenPipeError, KeyError):
                again.handle_error(None, (HOST, 1))
    printed = capsys.readouterr().err
    assert ("a bug" in printed, "gone" in printed) == (True, False)
    with pytest.raises(ValueError, match="port 70000"):
        listen(70000)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        launch(tmp_path, announce=pytest.fail)
