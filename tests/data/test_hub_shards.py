"""Shards on the hub, of which this is a small one: its list of files, and addresses that lead to another server."""

import hashlib
import http.server
import json
import logging
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from shard_files import Server, pair, serving, write_folders, write_shard

from vitlab.data import store
from vitlab.data.hub_shards import find_site
from vitlab.data.registry import load_dataset
from vitlab.data.remote import _split_of
from vitlab.data.write_shards import ShardSettings, write_shards

huggingface_hub = pytest.importorskip("huggingface_hub")
COMMIT = "c0ffee" * 6 + "beef"


class Hub(http.server.BaseHTTPRequestHandler):
    """Knows `ants/hill`, `ants/secret`, for which it wants to be shown a token, and `ants/gated`, whose list alone is
    for everyone. For what it has it sends on to `files`, for small files by way of another address of its own."""

    folder: ClassVar[Path]
    files: ClassVar[Server]
    shown: ClassVar[list[str | None]]
    commit: ClassVar[str] = COMMIT

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        self.shown.append(self.headers.get("Authorization"))
        parts = path.strip("/").split("/")
        if "secret" in parts and self.shown[-1] != "Bearer hf_good":
            self._say(401, {"error": "Invalid username or password."}, {"X-Error-Code": "RepoNotFound"})
        elif "gated" in parts and parts[0] == "datasets" and self.shown[-1] != "Bearer hf_good":
            self._say(401, {"error": "Access is restricted."}, {"X-Error-Code": "GatedRepo"})
        elif "expired" in parts:
            self._say(401, {"error": "Invalid credentials"}, {"X-Error-Message": "Invalid credentials"})
        elif "nothing" in parts:
            self._say(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif parts[:2] == ["api", "datasets"] and (len(parts) == 4 or parts[4:] in (["revision", "v2"],)):
            self._say(200, {"id": "/".join(parts[2:4]), "sha": self.commit, "siblings": []})
        elif parts[:2] == ["api", "datasets"] and parts[4] == "revision":
            self._say(404, {"error": f"Invalid rev id: {parts[5]}"}, {"X-Error-Code": "RevisionNotFound"})
        elif parts[:2] == ["api", "datasets"] and parts[4:] == ["tree", self.commit]:
            self._say(200, [self._listed(file) for file in sorted(self.folder.rglob("*"))])
        elif parts[0] == "datasets" and parts[3:5] == ["resolve", self.commit] and not path.endswith(".tar"):
            self._say(307, {}, {"Location": path.replace("resolve", "resolved")})
        elif parts[0] == "datasets" and parts[3:5] in (["resolve", self.commit], ["resolved", self.commit]):
            self._say(302, {}, {"Location": f"{self.files.address}/{'/'.join(parts[5:])}"})
        else:
            self._say(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})

    def _listed(self, file: Path) -> dict[str, object]:
        name = file.relative_to(self.folder).as_posix()
        if file.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40}
        data = file.read_bytes()
        lfs: dict[str, object] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        listed: dict[str, object] = {"type": "file", "path": name, "oid": "0" * 40, "size": len(data)}
        return listed | ({"lfs": lfs} if file.suffix == ".tar" else {})

    def _say(self, code: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


Start = Callable[[Path], type[Hub]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a hub whose repositories hold a folder's files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "PAUSE", 0.0)
    find_site.cache_clear()
    ended: list[Callable[[], object]] = []

    def begin(folder: Path) -> type[Hub]:
        files = serving(folder)
        hub = type("Started", (Hub,), {"folder": folder, "files": files.__enter__(), "shown": []})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), hub)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        ended.extend((lambda: files.__exit__(None, None, None), server.shutdown, server.server_close, thread.join))
        return hub

    yield begin
    for end in ended:
        end()


def test_a_set_that_shard_wrote(start: Start, tmp_path: Path) -> None:
    """Its `index.json` holds there as well; a image is fetched with its shard, and from the commit alone."""
    write_folders(tmp_path / "in", {"ant": 20, "bee": 10})
    write_shards(f"folder:{tmp_path / 'in'}", tmp_path / "out", ShardSettings(records=4))
    hub = start(tmp_path / "out")
    far, near = load_dataset("shards:hub:ants/hill", "train"), load_dataset(f"shards:{tmp_path / 'out'}", "train")
    assert far.classes == near.classes == ("ant", "bee")
    assert not any(name.endswith(".tar") for name in hub.files.asked)
    for i in range(len(near)):
        np.testing.assert_array_equal(far.image(i), near.image(i))
    assert f"/datasets/ants/hill/resolve/{COMMIT}/train-" in far.path(0)
    assert len(load_dataset("shards:hub:ants/hill@v2", "train")) == len(near)
    few = load_dataset("shards:hub:ants/hill/{train,val,test}-{000000..000000}.tar", "train")
    assert [few.path(i) for i in range(len(few))] == [p for p in map(far.path, range(len(far))) if "train-000000" in p]


def test_tars_of_others_with_the_hubs_sums(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No pattern is needed; the token is shown to the hub and not to the server that it sends one to."""
    caplog.set_level(logging.WARNING)
    place = tmp_path / "place"
    for shard in range(3):
        write_shard(place / "wds" / f"ants-train-{shard}.tar", [m for i in range(4) for m in pair(f"{i}", i % 2, i)])
    write_shard(place / "wds" / "ants-validation-0.tar", pair("v", 1, 99))
    write_shard(place / "wds" / "ants-test-0.tar", pair("t", 1, 98))
    write_shard(place / "other" / "0.tar", pair("o", 0))
    hub = start(place)
    heard: list[str | None] = []
    original = http.server.SimpleHTTPRequestHandler.translate_path
    monkeypatch.setattr(
        http.server.SimpleHTTPRequestHandler,
        "translate_path",
        lambda self, path: heard.append(self.headers.get("Authorization")) or original(self, path),
    )
    with pytest.raises(ValueError, match=r"there is no data set ants/secret on the hub, or not .* HF_TOKEN"):
        load_dataset("shards:hub:ants/secret/wds", "train")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    for _ in range(2):
        train = load_dataset("shards:hub:ants/secret/wds", "train")
        assert (len(train), train.labels.tolist()) == (12, [0, 1] * 6)
        assert int(load_dataset("shards:hub:ants/secret/wds", "val").image(0)[0, 0, 0]) == 99
    assert caplog.text.count("fetching its shards once") == 5
    assert set(hub.shown[1:]) == {"Bearer hf_good"}
    assert set(heard) == {None}
    assert "hf_good" not in repr(find_site("hub:ants/secret/wds"))
    with pytest.raises(ValueError, match="ants/secret has no tars; it has some in other, wds: give that"):
        load_dataset("shards:hub:ants/secret", "train")
    with pytest.raises(ValueError, match="ants/secret has no tars in wsd; it has some in other, wds"):
        load_dataset("shards:hub:ants/secret/wsd", "train")


def test_a_commit_that_leaves_the_tars_alone(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is fetched again; names with spaces, and an `index.json` of others, are no hindrance."""
    caplog.set_level(logging.WARNING)
    write_shard(tmp_path / "place" / "my train 0.tar", [m for i in range(20) for m in pair(f"{i}", i % 2, i)])
    (tmp_path / "place" / "index.json").write_text('{"shardlist": []}')
    hub = start(tmp_path / "place")
    first = load_dataset("shards:hub:ants/hill", "train")
    assert "its shards by their names: train 1" in caplog.text
    asked = hub.files.asked["my%20train%200.tar"] + hub.files.asked["my train 0.tar"]
    hub.commit = "d00d" * 10
    find_site.cache_clear()
    again = load_dataset("shards:hub:ants/hill", "train")
    assert again.path(0) == first.path(0).replace(COMMIT, hub.commit)
    np.testing.assert_array_equal(again.image(0), first.image(0))
    assert hub.files.asked["my%20train%200.tar"] + hub.files.asked["my train 0.tar"] == asked == 1


def test_the_token_goes_round_by_a_proxy_too() -> None:
    """A proxy takes the place of `host` in a request: the addresses themselves are compared."""
    request = urllib.request.Request("http://hub.example/a")
    request.add_unredirected_header("Authorization", "Bearer hf_good")
    request.set_proxy("127.0.0.1:9", "http")
    for address, shown in {"http://hub.example/b": True, "http://cdn.example/b": False}.items():
        new = store._Redirect().redirect_request(request, None, 302, "", {}, address)
        assert new is not None
        assert new.has_header("Authorization") == shown


def test_a_tar_that_is_not_what_the_hub_says(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path / "place" / "train-0.tar", pair("a", 0))
    start(tmp_path / "place")
    monkeypatch.setattr(Hub, "_listed", lambda self, file: _wrong(original(self, file)))
    with pytest.raises(ValueError, match=r"train-0.tar has the sha256 .*, not 0000"):
        load_dataset("shards:hub:ants/hill", "train")


original = Hub._listed


def _wrong(listed: dict[str, object]) -> dict[str, object]:
    return listed | {"lfs": {"oid": "0" * 64, "size": listed["size"], "pointerSize": 130}}


def test_what_is_not_there(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    start(tmp_path / "empty")
    for spec, words in {
        "hub:ants": "shards:hub:ants is no place on the hub: write shards:hub:OWNER/NAME",
        "hub:ants/expired": r"cannot be asked for ants/expired \(.*: log in again \(`hf auth login`",
        "hub:ants/nothing": "there is no data set ants/nothing on the hub",
        "hub:ants/hill@v9": "ants/hill has no revision 'v9'",
        "hub:ants/hill": "ants/hill has no tars; where it is no set of shards, hub:ants/hill reads it",
    }.items():
        with pytest.raises(ValueError, match=words):
            find_site(spec)
    write_shard(tmp_path / "empty" / "0.tar", pair("a", 0))
    with pytest.raises(ValueError, match=r"cannot fetch .*index.json \(the server says 401 .*consent, on its page"):
        load_dataset("shards:hub:ants/gated", "train")
    find_site.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"the hub cannot be asked for ants/hill \(.*\): try again later"):
        find_site("hub:ants/hill")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"needs the package huggingface-hub.*pip install 'vitlab\[hub\]'"):
        find_site("hub:ants/hill")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-000000.tar", "train"),
        ("val-0.tar", "val"),
        ("imagenet1k-validation-03.tar", "val"),
        ("Dev.tar", "val"),
        ("cifar_test_01.tar", "test"),
        ("0003.tar", "train"),
        ("testing-train-3.tar", "test"),
        ("detest-1.tar", "train"),
    ],
)
def test_splits_by_the_words_of_a_name(name: str, split: str) -> None:
    assert _split_of(name) == split
