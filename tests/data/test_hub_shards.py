"""Shards on the hub, of which this is a small one: its list of files, and addresses that lead to another server."""

import hashlib
import http.server
import json
import logging
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import numpy as np
import pytest
from shard_files import Server, pair, serving, write_folders, write_shard

from vitlab.data import downloads
from vitlab.data.registry import load_dataset
from vitlab.data.remote import _split_of, hub_address
from vitlab.data.write_shards import ShardSettings, write_shards
from vitlab.errors import UserError

COMMIT = "c0ffee" * 6 + "beef"


class Hub(http.server.BaseHTTPRequestHandler):
    """Knows `ants/hill`, `ants/secret`, for which it wants to be shown a token, and `ants/gated`, whose list alone is
    for everyone. For what it has it sends on to `files`, for small files by way of another address of its own."""

    folder: ClassVar[Path]
    files: ClassVar[Server]
    shown: ClassVar[list[str | None]]
    commit: ClassVar[str] = COMMIT
    wrong: ClassVar[bool] = False  # it lists other checksums

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
        elif parts[:2] == ["api", "datasets"] and parts[4:] in ([], ["revision", "v2"], ["revision", self.commit]):
            self._say(200, {"id": "/".join(parts[2:4]), "sha": self.commit, "siblings": []})
        elif parts[:2] == ["api", "datasets"] and parts[4] == "revision":
            self._say(404, {"error": f"Invalid rev id: {parts[5]}"}, {"X-Error-Code": "RevisionNotFound"})
        elif parts[:2] == ["api", "datasets"] and parts[4:6] == ["tree", self.commit]:
            folder = self.folder.joinpath(*parts[6:])
            self._say(200 if folder.is_dir() else 404, [self._listed(file) for file in sorted(folder.glob("*"))])
        elif parts[0] == "datasets" and parts[3:5] == ["resolve", self.commit] and not path.endswith(".tar"):
            self._say(307, {}, {"Location": path.replace("resolve", "resolved")})
        elif parts[0] == "datasets" and parts[3:5] in (["resolve", self.commit], ["resolved", self.commit]):
            self._say(302, {}, {"Location": f"{self.files.address}/{'/'.join(parts[5:])}"})
        else:
            self._say(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})

    def do_POST(self) -> None:
        """What is asked for by path."""
        self.shown.append(self.headers.get("Authorization"))
        data = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = urllib.parse.parse_qs(data)["paths"] if "paths=" in data else json.loads(data)["paths"]
        self._say(200, [self._listed(self.folder / path) for path in paths if (self.folder / path).exists()])

    def _listed(self, file: Path) -> dict[str, object]:
        name = file.relative_to(self.folder).as_posix()
        if file.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40}
        data = file.read_bytes()
        digest = "0" * 64 if self.wrong else hashlib.sha256(data).hexdigest()
        lfs: dict[str, object] = {"oid": digest, "size": len(data), "pointerSize": 130}
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
    monkeypatch.setattr(downloads, "PAUSE", 0.0)
    hub_address.cache_clear()
    huggingface_hub.HfFileSystem.clear_instance_cache()
    ended: list[Callable[[], object]] = []

    def begin(folder: Path) -> type[Hub]:
        files = serving(folder)
        hub = type("Started", (Hub,), {"folder": folder, "files": files.__enter__(), "shown": []})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), hub)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        ended.extend((lambda: files.__exit__(None, None, None), server.shutdown, server.server_close, thread.join))
        return hub

    yield begin
    for end in ended:
        end()


def test_a_set_that_shard_wrote(start: Start, tmp_path: Path) -> None:
    """Its `index.json` holds there as well; an image is downloaded with its shard, and from the commit alone."""
    write_folders(tmp_path / "in", {"ant": 20, "bee": 10})
    write_shards(f"folder:{tmp_path / 'in'}", tmp_path / "out", ShardSettings(records=4))
    hub = start(tmp_path / "out")
    far, near = load_dataset("shards:hub:ants/hill", "train"), load_dataset(f"shards:{tmp_path / 'out'}", "train")
    assert far.classes == near.classes == ("ant", "bee")
    assert not any(name.endswith(".tar") for name in hub.files.asked)
    for i in range(len(near)):
        np.testing.assert_array_equal(far.image(i), near.image(i))
    assert far.path(0).startswith(f"hf://datasets/ants/hill@{COMMIT}/train-")
    assert len(load_dataset("shards:hub:ants/hill@v2", "train")) == len(near)


def test_tars_of_others_with_the_hubs_sums(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No pattern is needed; the token goes to the hub and not to the server that it redirects to."""
    caplog.set_level(logging.WARNING)
    place = tmp_path / "place"
    for shard in range(3):
        write_shard(place / "wds" / f"ants-train-{shard}.tar", [m for i in range(4) for m in pair(f"{i}", i % 2, i)])
    write_shard(place / "wds" / "ants-validation-0.tar", pair("v", 1, 99))
    write_shard(place / "wds" / "ants-test-0.tar", pair("t", 1, 98))
    hub = start(place)
    heard: list[str | None] = []
    original = http.server.SimpleHTTPRequestHandler.translate_path
    monkeypatch.setattr(
        http.server.SimpleHTTPRequestHandler,
        "translate_path",
        lambda self, path: heard.append(self.headers.get("Authorization")) or original(self, path),
    )
    with pytest.raises(UserError, match=r"ants/secret.*HF_TOKEN"):
        load_dataset("shards:hub:ants/secret/wds", "train")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    huggingface_hub.HfFileSystem.clear_instance_cache()
    for _ in range(2):
        train = load_dataset("shards:hub:ants/secret/wds", "train")
        assert (len(train), train.labels.tolist()) == (12, [0, 1] * 6)
        assert int(load_dataset("shards:hub:ants/secret/wds", "val").image(0)[0, 0, 0]) == 99
    assert caplog.text.count("downloading its shards once") == 1
    assert hub.shown[-1] == "Bearer hf_good"
    assert set(heard) == {None}
    with pytest.raises(UserError, match=r"neither index.json nor a tar at .*ants/secret"):
        load_dataset("shards:hub:ants/secret", "train")


def test_a_commit_that_leaves_the_tars_alone(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is downloaded again; names with spaces, and an `index.json` of others, are no hindrance."""
    caplog.set_level(logging.WARNING)
    write_shard(tmp_path / "place" / "my train 0.tar", [m for i in range(20) for m in pair(f"{i}", i % 2, i)])
    (tmp_path / "place" / "index.json").write_text('{"shardlist": []}')
    hub = start(tmp_path / "place")
    first = load_dataset("shards:hub:ants/hill", "train")
    assert "by their names: train 1" in caplog.text
    sent = sum(hub.files.sent.values())
    hub.commit = "d00d" * 10
    hub_address.cache_clear()
    again = load_dataset("shards:hub:ants/hill", "train")
    assert again.path(0) == first.path(0).replace(COMMIT, hub.commit)
    np.testing.assert_array_equal(again.image(0), first.image(0))
    assert sum(hub.files.sent.values()) - sent < 1000  # the `index.json`


def test_a_tar_that_is_not_what_the_hub_says(start: Start, tmp_path: Path) -> None:
    write_shard(tmp_path / "place" / "train-0.tar", pair("a", 0))
    start(tmp_path / "place").wrong = True
    with pytest.raises(UserError, match=r"train-0.tar has the sha256 .*, expected 0000"):
        load_dataset("shards:hub:ants/hill", "train")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hub:ants", "expected shards:hub:OWNER/NAME"),
        ("hub:ants/expired", "ants/expired.*`hf auth login`"),
        ("hub:ants/nothing", "ants/nothing.*check the address"),
        ("hub:ants/hill@v9", "ants/hill@v9.*check the address"),
        ("hub:ants/hill", "neither index.json nor a tar"),
    ],
)
def test_what_is_not_there(start: Start, tmp_path: Path, spec: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    start(tmp_path / "empty")
    with pytest.raises(UserError, match=message):
        load_dataset(f"shards:{spec}", "train")


def test_gated_and_unreachable(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path / "set" / "0.tar", pair("a", 0))
    start(tmp_path / "set")
    with pytest.raises(UserError, match=r"ants/gated.*accept the terms"):
        load_dataset("shards:hub:ants/gated", "train")
    hub_address.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"ants/hill.*tried 6 times"):
        load_dataset("shards:hub:ants/hill", "train")


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
