"""Shards on the hub, of which this is a small one that redirects to another server."""

import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import numpy as np
import pytest
from shard_files import Server, serving, write_folders

from vitlab.data import downloads
from vitlab.data.registry import load_dataset
from vitlab.data.write_shards import ShardSettings, write_shards
from vitlab.errors import UserError

COMMIT = "c0ffee" * 6 + "beef"


class Hub(http.server.BaseHTTPRequestHandler):
    """Has `ants/hill`, and `ants/gated`, which requires a token; it redirects to `files`."""

    folder: ClassVar[Path]
    files: ClassVar[Server]
    revisions: ClassVar[set[str]]  # of the files that were requested

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        parts = urllib.parse.unquote(path).strip("/").split("/")
        if "resolve" in parts:
            self.revisions.add(parts[4])
        if "gated" in parts:
            self._respond(401, {"error": "Access is restricted."}, {"X-Error-Code": "GatedRepo"})
        elif "hill" not in parts:
            self._respond(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif parts[0] == "datasets":
            self._respond(302, {}, {"Location": f"{self.files.address}/{'/'.join(parts[5:])}"})
        elif parts[4:] in ([], ["revision", "main"], ["revision", "v2"], ["revision", COMMIT]):
            self._respond(200, {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": []})
        elif parts[4] == "tree":
            folder = self.folder.joinpath(*parts[6:])
            self._respond(200 if folder.is_dir() else 404, [self._listed(file) for file in sorted(folder.glob("*"))])
        else:
            self._respond(404, {"error": "Invalid revision"}, {"X-Error-Code": "RevisionNotFound"})

    def do_POST(self) -> None:
        """Information about files by their paths."""
        data = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = urllib.parse.parse_qs(data)["paths"] if "paths=" in data else json.loads(data)["paths"]
        self._respond(200, [self._listed(self.folder / path) for path in paths if (self.folder / path).exists()])

    def _listed(self, file: Path) -> dict[str, object]:
        listed: dict[str, object] = {"path": file.relative_to(self.folder).as_posix(), "oid": "0" * 40}
        return listed | ({"type": "directory"} if file.is_dir() else {"type": "file", "size": file.stat().st_size})

    def _respond(self, code: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub whose repositories hold the files of tmp_path/repository."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(downloads, "PAUSE", 0.0)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    folder = tmp_path / "repository"
    folder.mkdir()
    with serving(folder) as files:
        started = type("Started", (Hub,), {"folder": folder, "files": files, "revisions": set()})
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), started) as server:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_address[1]}"
            template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
            monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
            yield started
            server.shutdown()


def test_a_set_on_the_hub(hub: type[Hub], tmp_path: Path) -> None:
    """An image is downloaded with its shard, at one commit; another revision with the same files downloads nothing."""
    write_folders(tmp_path / "in", {"ant": 8, "bee": 6})
    written = tmp_path / "repository" / "wds"
    write_shards(f"folder:{tmp_path / 'in'}", written, ShardSettings(records=4))
    remote, local = load_dataset("shards:hub:ants/hill/wds", "train"), load_dataset(f"shards:{written}", "train")
    assert remote.classes == local.classes == ("ant", "bee")
    assert not any(name.endswith(".tar") for name in hub.files.asked)
    for i in range(len(local)):
        np.testing.assert_array_equal(remote.image(i), local.image(i))
    assert remote.path(0).startswith(f"hf://datasets/ants/hill@{COMMIT}/wds/train-")
    sent = sum(hub.files.sent.values())
    again = load_dataset("shards:hub:ants/hill@v2/wds/", "train")
    np.testing.assert_array_equal(again.image(0), remote.image(0))
    assert sum(hub.files.sent.values()) - sent == (written / "index.json").stat().st_size
    assert hub.revisions == {COMMIT}


@pytest.mark.usefixtures("hub")
def test_missing_sets() -> None:
    for spec, message in (
        ("hub:ants/gated", "`hf auth login`.*accept the terms"),
        ("hub:ants/nothing", "ants/nothing.*check the address"),
        ("hub:ants/hill@v9", "ants/hill@v9.*check the address"),
        ("hub:ants/hill", r"there is no index\.json"),
    ):
        with pytest.raises(UserError, match=message):
            load_dataset(f"shards:{spec}", "train")
