"""Shards at an address: whole tars are downloaded as they are needed, and cached.

A global shuffle would need all shards on this machine. Here shards are opened in a random order, and each image is
drawn at random while its shard is among the `WINDOW` open ones. The order is a function of (seed, epoch) alone, so that
a run resumes and is sharded over ranks as with any other data set.
"""

import collections
import functools
import hashlib
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Int64

from vitlab.data.dataset import BatchIndices, Dataset, Labels, SplitReader
from vitlab.data.downloads import download, read_url, retry
from vitlab.data.shard_index import CLASSES, INDEX, Locations, ShardIndex, class_names, parse_index, read_locations
from vitlab.data.shards import OpenFile, ShardEntries, create_split
from vitlab.errors import UserError
from vitlab.io import JSON_BYTES
from vitlab.rng import Stream, philox

WINDOW = 16  # shards that are mixed with each other at any time
CONNECTIONS = 4  # shards that a process downloads at a time, at most
CACHE_LIMIT = "VITLAB_SHARD_CACHE_GB"
"""The variable that limits the cached shards of a data set, in gigabytes; default: no limit."""


class ShardCache:
    """The files of the data set at the address `base`, cached in `folder`. Several processes may share the folder. With
    CACHE_LIMIT the least recently used tars are removed."""

    def __init__(self, base: str, folder: Path, index: ShardIndex) -> None:
        self.base, self.folder, self.files = base, folder, index.files
        limit = os.environ.get(CACHE_LIMIT, "inf")
        if limit != "inf" and not re.fullmatch(r"\d+(\.\d*)?", limit):
            raise UserError(f"{CACHE_LIMIT} is {limit!r}; expected gigabytes")
        self.limit = float(limit) * 1e9

    def fetch(self, name: str, cancelled: threading.Event | None = None) -> Path:
        """The path of a file, which is downloaded if missing. Raises UserError."""
        if name not in self.files:
            raise UserError(f"the index of {self.base} does not list {name}: write the data set again")
        file, path = self.files[name], self.folder / name
        if not path.exists():
            download(f"{self.base}/{name}", path, f"sha256:{file.sha256}", cancelled, quiet=True)
            self._make_space(path)
        with suppress(OSError):  # removed again, or owned by another user
            os.utime(path)
        return path

    def _make_space(self, newest: Path) -> None:
        tars = []
        for path in self.folder.glob("*.tar"):
            with suppress(FileNotFoundError):  # another process makes space as well
                stat = path.stat()
                tars.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in tars)
        for _, size, path in sorted(tars):
            if total > self.limit and path != newest:
                path.unlink(missing_ok=True)
                total -= size


@functools.lru_cache(WINDOW + CONNECTIONS)
def _open_cached(cache: ShardCache, name: str) -> OpenFile:
    """The open tar, which can be read even after it was removed from the cache."""
    while True:
        with suppress(FileNotFoundError):  # another process removed it just now
            return OpenFile(str(cache.fetch(name)))


def window_order(shard: Int[np.ndarray, " n"], window: int, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
    """An order of images, given the shard of each, that uses at most `window` shards at a time.

    Shards begin at the times 0, 1, 2, ..., in another order for every epoch. An image comes at its shard's time plus a
    delay, drawn uniformly from 0 to `window`. If there are at most `window` shards, all begin at 0.
    """
    _, number = np.unique(shard, return_inverse=True)  # counts only shards with images here
    count = int(number.max()) + 1
    draws = philox(seed, Stream.REMOTE_ORDER, epoch).random_raw(count + len(shard))
    begins = np.zeros(count)
    if count > window:
        begins[np.argsort(draws[:count], kind="stable")] = np.arange(count)
    delay = (draws[count:] >> np.uint64(11)) * (window * 2.0**-53)  # 53 random bits each: uniform in [0, window)
    return np.argsort(begins[number] + delay, kind="stable").astype(np.int64)


class RemoteEntries(ShardEntries):
    """Images in the tars of an address; a tar is downloaded when it is first needed."""

    is_local = False

    def __init__(self, locations: Locations, cache: ShardCache) -> None:
        super().__init__(cache.base, locations)
        self.cache, self.identity = cache, cache.folder.name

    def read_at(self, file: str, offset: int, size: int) -> bytes:
        return _open_cached(self.cache, file.rpartition("/")[2]).read(offset, size)

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return window_order(self.locations.shard[self.rows], WINDOW, seed, epoch)

    def read_ahead(self, batches: Iterator[BatchIndices]) -> Iterator[BatchIndices]:
        """Yields each batch once its shards are cached: this process waits for the server, DataLoader workers do not.

        Meanwhile the shards of the next batches are downloaded, until these batches hold more images than a shard.
        """
        names, shard = self.locations.shards, self.locations.shard
        images_per_shard = len(self.rows) / len(np.unique(shard[self.rows]))
        downloads: dict[str, Future[Path]] = {}
        queue: collections.deque[tuple[BatchIndices, list[str]]] = collections.deque()
        cancelled = threading.Event()
        pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="shards")

        def first_batch() -> BatchIndices:
            batch, needed = queue.popleft()
            for name in needed:
                downloads[name].result()
            # A shard that is needed again much later is fetched again: it may have been removed by then.
            for name in set(needed).difference(*(following for _, following in queue)):
                del downloads[name]
            return batch

        try:
            for epochs, indices in batches:
                needed = [names[s] for s in np.unique(shard[self.rows[indices]]).tolist()]
                queue.append(((epochs, indices), needed))
                for name in needed:
                    if name not in downloads:
                        downloads[name] = pool.submit(self.cache.fetch, name, cancelled)
                if len(queue) * max(1, len(indices)) > images_per_shard:
                    yield first_batch()
            while queue:
                yield first_batch()
        finally:
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)


def remote_splits(address: str, name: str, cache: Path) -> SplitReader:
    """The data set at an address, as `vitlab shard` writes it; its files are cached in a folder below `cache`. For
    example `https://HOST/FOLDER`, `hub:OWNER/NAME@REVISION/FOLDER`."""
    base = _pin(re.sub("^hub:", "hf://datasets/", address).rstrip("/"))

    # The rest of a larger file is cut off, which is then no valid JSON.
    data = read_url(f"{base}/{INDEX}", JSON_BYTES, required=False)
    if data is None:
        raise UserError(
            f"there is no {INDEX} at {base}: give the address of a data set that `vitlab shard` wrote. "
            f"Other data sets of the hub are hub:OWNER/NAME"
        )
    index = parse_index(data, f"{base}/{INDEX}")
    # The folder is named by the content, which another revision or address may share.
    shards = ShardCache(base, cache / hashlib.sha256(data).hexdigest()[:16], index)

    @functools.cache
    def read_split(split: str) -> tuple[ShardEntries, Labels]:
        tars = [file.file for file in index.shards[split]]
        locations, labels = read_locations(shards.fetch(f"{split}.index.npz"), tars)
        return RemoteEntries(locations, shards), labels

    def read(split: str) -> Dataset:
        classes = class_names(shards.fetch(CLASSES)) if CLASSES in shards.files else ()
        return create_split(name, split, list(index.shards), classes, read_split)

    return list(index.shards), read


@functools.cache
def _pin(base: str) -> str:
    """An address of the hub at the newest commit of its revision, looked up once per process; others as they are."""

    def resolve(filesystem: Any, path: str) -> str:
        from huggingface_hub import HfApi

        resolved = filesystem.resolve_path(path)
        info = HfApi(endpoint=filesystem.endpoint).repo_info(
            resolved.repo_id, revision=resolved.revision, repo_type=resolved.repo_type
        )
        return f"{resolved.repo_type}s/{resolved.repo_id}@{info.sha}/{resolved.path_in_repo}".rstrip("/")

    return f"hf://{retry(base, resolve)}" if base.startswith("hf://") else base
