"""Shards at an address: whole tars are downloaded as they are needed, and as many stay cached as there is room for.

A global shuffle would need all shards on this machine. Here shards are opened in a random order,
and each image is drawn at random while its shard is among the `WINDOW` open ones. It is a function of seed, epoch and
position alone, so that a run resumes and shares its work among processes as with any other data set.
"""

import collections
import functools
import hashlib
import itertools
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64

from vitlab.data.dataset import Dataset, Labels, Request, Splits
from vitlab.data.downloads import download, read_small, retry
from vitlab.data.folder import SPLIT_FOLDERS
from vitlab.data.shard_index import (
    CLASSES,
    FORMAT,
    INDEX,
    File,
    Places,
    ShardIndex,
    class_names,
    parse_index,
    read_index,
    read_places,
)
from vitlab.data.shards import OpenFile, ShardEntries, labeled, write_index
from vitlab.errors import UserError
from vitlab.io import parse_json
from vitlab.rng import Stream, philox

logger = logging.getLogger(__name__)

WINDOW = 16
"""Shards that are mixed with each other at any time."""
CONNECTIONS = 4
"""Largest number of shards that a process downloads at a time."""
MAX_TARS = 1_000_000
"""Largest number of tars that a pattern may name."""
ROOM = "VITLAB_SHARD_CACHE_GB"
"""The variable that limits the cached shards of a data set, in gigabytes; default: no limit."""


# ------------------------------------------------------------------------------------------------- the cache


class ShardCache:
    """The files of a data set below the address `base`, and those of them that are cached in `folder`.

    Several processes may share the folder. Where the variable ROOM is set, the tars that were not used for longest are
    removed. Raises UserError if there is no room for those that are in use together.
    """

    def __init__(self, base: str, folder: Path, index: ShardIndex) -> None:
        self.base, self.folder, self.room = base, folder, None
        self.files = {file.file: file for file in index.files}
        if value := os.environ.get(ROOM):
            sizes = [tar.bytes for tars in index.shards.values() for tar in tars]
            least = min((WINDOW + CONNECTIONS + 2) * max(sizes), sum(sizes))
            if not re.fullmatch(r"\d+(\.\d*)?", value) or float(value) * 1e9 < least:
                raise UserError(
                    f"{ROOM} is {value!r}; expected gigabytes, {least / 1e9:.2g} or more for this data set. Smaller "
                    f"shards (`vitlab shard --megabytes`) need less"
                )
            self.room = int(float(value) * 1e9)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "opened"}

    @functools.cached_property
    def opened(self) -> Callable[[str], OpenFile]:
        """name -> the open file: it can be read even after it was removed to make room."""
        return functools.lru_cache(WINDOW + CONNECTIONS)(self._open)

    def _open(self, name: str) -> OpenFile:
        while True:
            with suppress(FileNotFoundError):  # another process made room just now
                return OpenFile(str(self.fetch(name)))

    def fetch(self, name: str, cancelled: threading.Event | None = None) -> Path:
        """The path of a file, which is downloaded unless it is there. Raises UserError."""
        if name not in self.files:
            raise UserError(f"the index of {self.base} does not list {name}: write the data set again")
        file, path = self.files[name], self.folder / name
        if not path.exists():
            digest, size = f"sha256:{file.sha256}" if file.sha256 else "", file.bytes if file.bytes >= 0 else None
            download(f"{self.base}/{name}", path, digest, size, cancelled, quiet=True)
            if self.room is not None:
                self._make_room(path, self.room)
        with suppress(OSError):  # removed again, or owned by another user
            os.utime(path)
        return path

    def _make_room(self, newest: Path, room: int) -> None:
        tars = []
        for path in self.folder.glob("*.tar"):
            with suppress(FileNotFoundError):  # another process makes room as well
                stat = path.stat()
                tars.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in tars)
        for _, size, path in sorted(tars):
            if total > room and path != newest:
                path.unlink(missing_ok=True)
                total -= size


# ------------------------------------------------------------------------------------------------- the order


def window_order(shard: Int[np.ndarray, " n"], window: int, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
    """An order of the images that lie in the shards `shard`, of which at most `window` are in use at a time.

    Shards begin one after the other, in another order for every epoch; an image comes at a time, uniformly distributed,
    between the beginning of its shard and that of the `window`-th after it. If there are no more shards than that, all
    begin at once.
    """
    _, number = np.unique(shard, return_inverse=True)
    count = int(number.max()) + 1
    draws = philox(seed, Stream.REMOTE_ORDER, epoch).random_raw(count + len(shard))
    begins = np.zeros(count)
    if count > window:
        begins[np.argsort(draws[:count], kind="stable")] = np.arange(count)
    delay = (draws[count:] >> np.uint64(11)) * (window * 2.0**-53)
    return np.argsort(begins[number] + delay, kind="stable").astype(np.int64)


class RemoteEntries(ShardEntries):
    """Images in the tars of an address; a tar is downloaded when it is first needed."""

    near = False

    def __init__(self, places: Places, rows: np.ndarray | None, cache: ShardCache) -> None:
        super().__init__(cache.base, places, rows)
        self.cache = cache

    def of(self, places: Places, rows: np.ndarray) -> "RemoteEntries":
        return RemoteEntries(places, rows, self.cache)

    def read_at(self, file: str, offset: int, size: int) -> bytes:
        return self.cache.opened(file.rpartition("/")[2]).read(offset, size)

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return window_order(self.places.shard[self.rows], WINDOW, seed, epoch)

    def read_ahead(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Each request once its shards are here, while those of the next are downloaded: of as many requests as a shard
        has images for. So this process waits for the server, and not one of those that read images."""
        names, shard = self.places.shards, self.places.shard
        mean = len(self.rows) / len(np.unique(shard[self.rows]))
        futures: dict[str, Future[Path]] = {}
        queue: collections.deque[tuple[Request, list[str]]] = collections.deque()
        pending: collections.Counter[str] = collections.Counter()
        pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="shards")
        cancelled = threading.Event()
        try:
            for request in itertools.chain(requests, itertools.repeat(None)):
                if request is not None:
                    needed = [names[s] for s in np.unique(shard[self.rows[request[1]]]).tolist()]
                    queue.append((request, needed))
                    pending.update(needed)
                    for name in needed:
                        if name not in futures:
                            futures[name] = pool.submit(self.cache.fetch, name, cancelled)
                    enough = len(queue) * max(1, len(request[1])) > mean
                    if not enough and sum(not future.done() for future in futures.values()) <= CONNECTIONS:
                        continue
                if not queue:
                    return
                first, needed = queue.popleft()
                for name in needed:
                    futures[name].result()
                yield first
                pending.subtract(needed)
                for name in needed:
                    if not pending[name]:
                        del futures[name], pending[name]
        finally:
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)


# ------------------------------------------------------------------------------------------------ data sets


def remote_splits(address: str, name: str, cache: Path) -> Splits:
    """The data set at an address, as `vitlab shard` writes it, or those of its tars that a pattern names.

    For example `https://HOST/FOLDER`, `s3://BUCKET/FOLDER/train-{000000..000099}.tar`, `hub:OWNER/NAME@REVISION/SUB`.
    Every data set has a folder below `cache`. Tars without an `index.json` are all downloaded once, to be scanned.
    """
    base, pattern = address.rstrip("/"), ""
    if base.endswith(".tar"):
        base, _, pattern = base.rpartition("/")
    source = base
    if base.startswith("hub:"):
        source, base = re.sub(r"^hub:|@[^/]*", lambda match: "hub/" * (match[0] == "hub:"), base), hub_address(base)
    data = read_small(f"{base}/{INDEX}")
    if data is None or FORMAT.encode() not in data:  # or another program's file of this name
        tars = [File(tar, -1, "") for tar in expand(pattern)] if pattern else _list_tars(base)
        listed = pattern or [(tar.file, tar.bytes, tar.sha256) for tar in tars]
        folder = _cache_folder(cache, source, f"{source}/{listed}".encode())
        index = _scan_once(base, tars, folder)
    else:
        folder = _cache_folder(cache, source, data)
        index = parse_index(data, f"{base}/{INDEX}")
        index = _select(index, expand(pattern), base) if pattern else index
    shards = ShardCache(base, folder, index)

    @functools.cache
    def find(split: str) -> tuple[ShardEntries, Labels]:
        if split not in index.shards:
            raise UserError(f"{address} has no shards of the {split} split, only of {', '.join(index.shards)}")
        stored = read_places(shards.fetch(f"{split}.index.npz"))
        numbers = {name: number for number, name in enumerate(stored[0].shards if stored else ())}
        names = [file.file for file in index.shards[split]]
        if stored is None or not numbers.keys() >= set(names):
            raise UserError(f"{base}/{split}.index.npz does not match {INDEX}: write the data set again")
        places, labels = stored
        rows = np.flatnonzero(np.isin(places.shard, [numbers[name] for name in names]))
        return RemoteEntries(places, rows, shards), labels.take(rows)

    def read(split: str) -> Dataset:
        classes = class_names(shards.fetch(CLASSES)) if CLASSES in shards.files else ()
        return labeled(name, split, classes, find)

    return list(index.shards), read


def _select(index: ShardIndex, names: Sequence[str], base: str) -> ShardIndex:
    """Only the tars `names`."""
    if missing := sorted(set(names) - {file.file for file in index.files}):
        raise UserError(f"{base}/{INDEX} does not list {missing[0]} ({len(missing)} of {len(names)} are missing)")
    chosen = set(names)
    shards = {split: tuple(tar for tar in tars if tar.file in chosen) for split, tars in index.shards.items()}
    return ShardIndex({split: tars for split, tars in shards.items() if tars}, index.beside)


def _cache_folder(cache: Path, source: str, content: bytes) -> Path:
    """Another folder for other content, and the same one for the same content at another revision."""
    name = re.sub(r"[^\w.-]", "-", re.sub(r"^\w+://", "", source))[:80]
    return cache / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"


@functools.cache
def hub_address(spec: str) -> str:
    """`hub:OWNER/NAME[@REVISION][/FOLDER]` as an `hf://` address of its newest commit, looked up once per process."""
    match = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?", spec)
    if not match:
        raise UserError(f"shards:{spec} is invalid; expected shards:hub:OWNER/NAME, and @REVISION or /FOLDER after it")
    repository, revision, folder = match.groups()

    def find_commit(filesystem: object, path: str) -> str:
        from huggingface_hub import HfApi, constants

        info = HfApi(endpoint=constants.ENDPOINT).repo_info(repository, revision=revision, repo_type="dataset")
        return str(info.sha)

    commit = retry(f"hf://datasets/{repository}{f'@{revision}' if revision else ''}", find_commit)
    return "/".join(filter(None, (f"hf://datasets/{repository}@{commit}", folder)))


def _list_tars(base: str) -> list[File]:
    """The tars directly at an address, where its file system can list them, with the checksums that it knows."""
    entries = []
    if not base.startswith("http"):
        entries = retry(base, lambda filesystem, path: filesystem.ls(path, detail=True), missing=[])
    tars = [
        File(entry["name"].rpartition("/")[2], entry["size"] or -1, (entry.get("lfs") or {}).get("sha256", ""))
        for entry in entries
        if entry["name"].endswith(".tar")
    ]
    if not tars:
        raise UserError(
            f"there is neither {INDEX} nor a tar at {base}: write the data set with `vitlab shard`, or name its tars, "
            f"as in {base}/train-{{000000..000099}}.tar. A data set of the hub that is not in shards is hub:OWNER/NAME"
        )
    return sorted(tars, key=lambda tar: tar.file)


def _scan_once(base: str, tars: Sequence[File], folder: Path) -> ShardIndex:
    """The index of tars that have none, which is written to `folder`."""
    if (folder / INDEX).exists():
        return read_index(folder / INDEX)
    shards = ShardCache(base, folder, ShardIndex({"": tuple(tars)}))
    names: dict[str, list[str]] = collections.defaultdict(list)
    for tar in tars:
        names[_split_of(tar.file)].append(tar.file)
    counts = ", ".join(f"{split} {len(tars)}" for split, tars in names.items())
    logger.warning("%s: downloading its shards once, for there is no %s; by their names: %s", base, INDEX, counts)
    classes = read_small(f"{base}/{CLASSES}")
    paths = {split: map(shards.fetch, tars) for split, tars in names.items()}
    return write_index(folder, paths, None if classes is None else parse_json(classes, f"{base}/{CLASSES}"))


def _split_of(name: str) -> str:
    """The first word of a tar's name that is a split's, as in `imagenet-validation-00.tar`; train where none is."""
    known = {folder: split for split, names in SPLIT_FOLDERS.items() for folder in names}
    return next((known[word] for word in re.split(r"[-_.]", name.lower()) if word in known), "train")


def expand(pattern: str) -> list[str]:
    """`a-{000..002}.tar` and `{a,b}-0.tar` as a shell does, each name once. Raises UserError for other braces."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] for part in parts]
    for i in range(1, len(parts), 2):
        if match := re.fullmatch(r"(\d{1,15})\.\.(\d{1,15})", parts[i]):
            first, last = match.groups()
            choices[i] = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)[: MAX_TARS + 1]]
        else:
            choices[i] = parts[i].split(",") if "," in parts[i] else []
        if not choices[i]:
            raise UserError(
                f"{{{parts[i]}}} in {pattern} is invalid; expected a range {{000000..000099}} or a list {{a,b}}"
            )
    if math.prod(map(len, choices)) > MAX_TARS:
        raise UserError(f"{pattern} names more than {MAX_TARS:,} tars: write several data sets, or larger tars")
    return list(dict.fromkeys(map("".join, itertools.product(*choices))))
