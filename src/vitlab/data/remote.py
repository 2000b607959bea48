"""Shards at an address: whole tars are downloaded as they are needed, and as many stay cached as there is room for.

An order that jumps through all of the data would need all of it here. This one walks: shards begin in an order of the
epoch's own, and an image comes at a random time while its shard is one of the `WINDOW` under way. It is a function of
seed, epoch and position alone, so that a run resumes and shares its work among processes as with any other data set.
"""

import collections
import functools
import hashlib
import itertools
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64

from vitlab.data.dataset import Dataset, Labels, Request, Splits
from vitlab.data.downloads import read_small, retry
from vitlab.data.folder import SPLIT_FOLDERS
from vitlab.data.shard_cache import ShardCache, cache_limit
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
    write_places,
)
from vitlab.data.shards import ShardEntries, labeled, scan
from vitlab.errors import UserError
from vitlab.io import replacing_file
from vitlab.rng import Stream, philox

logger = logging.getLogger(__name__)

WINDOW = 16
"""Shards that are mixed with each other at any time."""
CONNECTIONS = 4
"""Largest number of shards that a process downloads at a time."""
MAX_TARS = 1_000_000
"""Largest number of tars that a pattern may name."""


# --------------------------------------------------------------------------------------------------- the order


def window_order(shard: Int[np.ndarray, " n"], window: int, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
    """An order of the images that lie in the shards `shard`, of which at most `window` are under way at a time.

    Shards begin one after the other, in an order of the epoch's own; an image comes at a time, uniformly distributed,
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

    def __init__(self, folder: str, places: Places, rows: np.ndarray | None, cache: ShardCache) -> None:
        super().__init__(folder, places, rows)
        self.cache = cache

    def of(self, places: Places, rows: np.ndarray) -> "RemoteEntries":
        return RemoteEntries(self.folder, places, rows, self.cache)

    def read_at(self, file: str, offset: int, size: int) -> bytes:
        return self.cache.opened(file.rpartition("/")[2]).read(offset, size)

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return window_order(self.places.shard[self.rows], WINDOW, seed, epoch)

    def read_ahead(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Each request once its shards are here, while those of the next are on their way: as many requests as a shard
        has images for. So it is this process that waits for the server, and not one of those that read images."""
        names, shard = self.places.shards, self.places.shard
        mean = len(self.rows) / len(np.unique(shard[self.rows]))
        coming: dict[str, Future[Path]] = {}
        queue: collections.deque[tuple[Request, list[str]]] = collections.deque()
        users: collections.Counter[str] = collections.Counter()
        pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="shards")
        cancelled = threading.Event()
        try:
            for request in itertools.chain(requests, itertools.repeat(None)):
                if request is not None:
                    needed = [names[s] for s in np.unique(shard[self.rows[request[1]]]).tolist()]
                    queue.append((request, needed))
                    users.update(needed)
                    for name in needed:
                        if name not in coming:
                            coming[name] = pool.submit(self.cache.fetch, name, cancelled)
                    enough = len(queue) * max(1, len(request[1])) > mean
                    if not enough and sum(not future.done() for future in coming.values()) <= CONNECTIONS:
                        continue
                if not queue:
                    return
                first, needed = queue.popleft()
                for name in needed:
                    coming[name].result()
                yield first
                users.subtract(needed)
                for name in needed:
                    if not users[name]:
                        del coming[name], users[name]
        finally:
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)


# --------------------------------------------------------------------------------------------------- finding


def remote_splits(address: str, name: str, cache: Path) -> Splits:
    """The data set at an address, as `vitlab shard` writes it, or those of its tars that a pattern names.

    For example `https://HOST/FOLDER`, `s3://BUCKET/FOLDER/train-{000000..000099}.tar`, `hub:OWNER/NAME@REVISION/SUB`.
    What is downloaded lies in a folder of its own below `cache`. Tars without an `index.json` are all downloaded once,
    to be scanned.
    """
    base, pattern = address.rstrip("/"), None
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
        index = _selected(index, expand(pattern), base) if pattern else index
    shards = _open_cache(base, folder, index)

    @functools.cache
    def find(split: str) -> tuple[Places, Labels]:
        if split not in index.shards:
            raise UserError(f"{address} has no shards of the {split} split, only of {', '.join(index.shards)}")
        whole = read_places(shards.fetch(f"{split}.index.npz"))
        if whole is None:
            raise UserError(f"{base}/{split}.index.npz is corrupt on the server: write the data set again")
        return _of_shards(*whole[:2], [file.file for file in index.shards[split]], base)

    def read(split: str) -> Dataset:
        classes = class_names(shards.fetch(CLASSES)) if CLASSES in shards.files else ()
        return labeled(name, split, classes, find, lambda places: RemoteEntries(base, places, None, shards))

    return list(index.shards), read


def _cache_folder(cache: Path, source: str, content: bytes) -> Path:
    """Another folder for other content, and the same one for the same content at another revision."""
    name = re.sub(r"[^\w.-]", "-", re.sub(r"^\w+://", "", source))[:80]
    return cache / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"


def _open_cache(base: str, folder: Path, index: ShardIndex) -> ShardCache:
    least = WINDOW + CONNECTIONS + 2
    room = cache_limit([tar for tars in index.shards.values() for tar in tars], least)
    return ShardCache(base, folder, index.files, room, handles=WINDOW + CONNECTIONS)


@functools.cache
def hub_address(spec: str) -> str:
    """`hub:OWNER/NAME[@REVISION][/FOLDER]` as an `hf://` address of its newest commit, looked up once per process."""
    match = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?", spec)
    if not match:
        raise UserError(
            f"shards:{spec} is invalid; expected shards:hub:OWNER/NAME, or with @REVISION or /FOLDER after it"
        )
    repository, revision, folder = match.groups()
    suffix = f"@{revision}" if revision else ""

    def find_commit(filesystem: object, path: str) -> str:
        from huggingface_hub import HfApi, constants

        info = HfApi(endpoint=constants.ENDPOINT).repo_info(repository, revision=revision, repo_type="dataset")
        return str(info.sha)

    commit = retry(f"hf://datasets/{repository}{suffix}", find_commit)
    return "/".join(filter(None, (f"hf://datasets/{repository}@{commit}", folder)))


def _list_tars(base: str) -> list[File]:
    """The tars directly at an address, where its file system can list them, with the checksums that it knows."""
    found = []
    if not base.startswith("http"):
        found = retry(base, lambda filesystem, path: filesystem.ls(path, detail=True), missing=[])
    tars = {entry["name"].rpartition("/")[2]: entry for entry in found if entry["name"].endswith(".tar")}
    if not tars:
        raise UserError(
            f"there is neither {INDEX} nor a tar at {base}: write the data set with `vitlab shard`, or name its tars, "
            f"as in {base}/train-{{000000..000099}}.tar. A data set of the hub that is not in shards is hub:OWNER/NAME"
        )
    sums = {name: (entry.get("lfs") or {}).get("sha256", "") for name, entry in tars.items()}
    return [File(name, -1 if tars[name]["size"] is None else tars[name]["size"], sums[name]) for name in sorted(tars)]


def _scan_once(base: str, tars: Sequence[File], folder: Path) -> ShardIndex:
    """The index of tars that have none; it is kept in `folder`."""
    if (folder / INDEX).exists():
        return read_index(folder / INDEX)
    sizes = [tar.bytes if tar.bytes >= 0 else _size_of(f"{base}/{tar.file}") for tar in tars]
    tars = [File(tar.file, size, tar.sha256) for tar, size in zip(tars, sizes, strict=True)]
    shards = _open_cache(base, folder, ShardIndex({"": tuple(tars)}, (), {}, {}))
    scanned: dict[str, list[tuple[File, Places, Labels]]] = collections.defaultdict(list)
    for number, tar in enumerate(tars, 1):
        logger.warning("%s has no %s: downloading its shards once, %d of %d", base, INDEX, number, len(tars))
        path = shards.fetch(tar.file)
        places, labels = scan([path])
        scanned[_split_of(tar.file)].append((File.of(path, len(places)), places, labels))
    beside = []
    for split, parts in scanned.items():
        labels = functools.reduce(Labels.join, (labels for _, _, labels in parts))
        write_places(folder / f"{split}.index.npz", Places.joined([places for _, places, _ in parts]), labels)
        beside.append(File.of(folder / f"{split}.index.npz"))
    if (classes := read_small(f"{base}/{CLASSES}")) is not None:
        with replacing_file(folder / CLASSES) as file:
            file.write(classes)
        beside.append(File.of(folder / CLASSES))
    counts = ", ".join(f"{split} {len(parts)}" for split, parts in scanned.items())
    logger.warning("%s: shards of each split, by their names: %s", base, counts)
    index = ShardIndex(
        {split: tuple(f for f, _, _ in parts) for split, parts in scanned.items()}, tuple(beside), {}, {}
    )
    index.write(folder / INDEX)
    return index


def _size_of(url: str) -> int:
    size = retry(url, lambda filesystem, path: filesystem.info(path)["size"])
    if size is None:
        raise UserError(f"the server of {url} does not say how large it is: download the shards, and give their folder")
    return size


def _split_of(name: str) -> str:
    """The first word of a tar's name that is a split's, as in `imagenet-validation-00.tar`; train where none is."""
    known = {folder: split for split, names in SPLIT_FOLDERS.items() for folder in names}
    return next((known[word] for word in re.split(r"[-_.]", name.lower()) if word in known), "train")


def _selected(index: ShardIndex, names: Sequence[str], base: str) -> ShardIndex:
    """Only the tars `names`."""
    if missing := sorted(set(names) - {tar.file for tars in index.shards.values() for tar in tars}):
        raise UserError(f"{base}/{INDEX} does not list {missing[0]} ({len(missing)} of {len(names)} are missing)")
    shards = {split: tuple(tar for tar in tars if tar.file in names) for split, tars in index.shards.items()}
    return ShardIndex({split: tars for split, tars in shards.items() if tars}, index.beside, {}, {})


def _of_shards(places: Places, labels: Labels, wanted: Sequence[str], base: str) -> tuple[Places, Labels]:
    """Only the images of the shards `wanted`."""
    if places.shards == tuple(wanted):
        return places, labels
    if not set(wanted) <= set(places.shards):
        raise UserError(f"{base}: {INDEX} and the index of the images list different shards: write the data set again")
    some, rows = places.of_shards(wanted)
    return some, labels.take(rows)


def expand(pattern: str) -> list[str]:
    """`a-{000..002}.tar` and `{a,b}-0.tar` as a shell does, each name once. Raises UserError for other braces."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices: list[list[str]] = [[part] for part in parts]
    count = 1
    for place in range(1, len(parts), 2):
        if match := re.fullmatch(r"(\d{1,15})\.\.(\d{1,15})", parts[place]):
            first, last = match.groups()
            numbers = range(int(first), int(last) + 1)[: MAX_TARS + 1]
            choices[place] = [str(n).zfill(len(first)) for n in numbers]
        else:
            choices[place] = parts[place].split(",") if "," in parts[place] else []
        if not choices[place]:
            raise UserError(
                f"{{{parts[place]}}} in {pattern} is invalid; expected a range {{000000..000099}} or a list {{a,b}}"
            )
        count *= len(choices[place])
        if count > MAX_TARS:
            raise UserError(f"{pattern} names more than {MAX_TARS:,} tars: write several data sets, or larger tars")
    return list(dict.fromkeys(map("".join, itertools.product(*choices))))
