"""Shards on a web server: whole tars are fetched as they are needed, and kept as many as there is room for.

An order that jumps through all of the data would need all of it here. This one walks: shards begin in an order of the
epoch's own, and a image comes at a random time while its shard is one of the `WINDOW` under way. It is a function of
seed, epoch and position alone, so that a run resumes and shares its work among processes as with any other set.
"""

import collections
import functools
import hashlib
import itertools
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64

from vitlab.data.dataset import Dataset, Labels, Request, Splits
from vitlab.data.folder import SPLIT_FOLDERS
from vitlab.data.hub_shards import PREFIX, Site, find_site
from vitlab.data.shard_index import (
    CLASSES,
    FORMAT,
    INDEX,
    File,
    Listing,
    Places,
    class_names,
    listing_of,
    read_listing,
    read_places,
    write_places,
)
from vitlab.data.shards import ShardEntries, labeled, look_through
from vitlab.data.store import Store, get, size_of
from vitlab.errors import UserError
from vitlab.io import replacing_file
from vitlab.rng import Stream, philox

logger = logging.getLogger(__name__)

WINDOW = 16
"""Shards that are mixed with each other at any time."""
CONNECTIONS = 4
"""Most shards that a process fetches at a time."""
MAX_TARS = 1_000_000
"""Most tars that a pattern may name."""
ROOM = "VITLAB_SHARD_CACHE_GB"
"""The variable that limits how much of a set is kept, in gigabytes; all of it unless set."""


# --------------------------------------------------------------------------------------------------- the order


def window_order(shard: Int[np.ndarray, " n"], window: int, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
    """An order of the images that lie in the shards `shard`, of which at most `window` are under way at a time.

    Shards begin one after the other, in an order of the epoch's own; a image comes at a time, uniformly distributed,
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
    """Images in the tars of a web address; a tar is fetched when it is first asked for."""

    near = False

    def __init__(self, folder: str, places: Places, rows: np.ndarray | None, store: Store) -> None:
        super().__init__(folder, places, rows)
        self.store = store

    def of(self, places: Places, rows: np.ndarray) -> "RemoteEntries":
        return RemoteEntries(self.folder, places, rows, self.store)

    def read_at(self, file: str, offset: int, size: int) -> bytes:
        return self.store.read(file.rpartition("/")[2], offset, size)

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return window_order(self.places.shard[self.rows], WINDOW, seed, epoch)

    def read_ahead(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Each request once its shards are here, while those of the next are on their way: as many requests as a shard
        has images for. So it is this process that waits for the server, and not one of those that read images."""
        names, shard = self.places.shards, self.places.shard
        mean = len(self.rows) / len(np.unique(shard[self.rows]))
        coming: dict[str, Future[str]] = {}
        line: collections.deque[tuple[Request, list[str]]] = collections.deque()
        users: collections.Counter[str] = collections.Counter()
        pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="shards")
        over = threading.Event()
        try:
            for request in itertools.chain(requests, itertools.repeat(None)):
                if request is not None:
                    needed = [names[s] for s in np.unique(shard[self.rows[request[1]]]).tolist()]
                    line.append((request, needed))
                    users.update(needed)
                    for name in needed:
                        if name not in coming:
                            coming[name] = pool.submit(self.store.fetch, name, over)
                    enough = len(line) * max(1, len(request[1])) > mean
                    if not enough and sum(not each.done() for each in coming.values()) <= CONNECTIONS:
                        continue
                if not line:
                    return
                first, needed = line.popleft()
                for name in needed:
                    coming[name].result()
                yield first
                users.subtract(needed)
                for name in needed:
                    if not users[name]:
                        del coming[name], users[name]
        finally:
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)


# --------------------------------------------------------------------------------------------------- finding


def is_address(path: str) -> bool:
    """Whether a set's place is on a web server, or on the hub."""
    return path.startswith(("http://", "https://", PREFIX))


def remote_splits(address: str, name: str, cache: Path) -> Splits:
    """The set at `https://HOST/FOLDER/` or `hub:OWNER/NAME`, as `vitlab shard` writes it, or those of its tars that a
    pattern names: `https://HOST/FOLDER/train-{000000..000099}.tar`. What is fetched lies in a folder of its own below
    `cache`.

    Tars without an `index.json`, which a pattern names or the hub lists, are all fetched once, to be looked through.
    """
    place, pattern = address.rstrip("/"), None
    if place.endswith(".tar"):
        place, _, pattern = place.rpartition("/")
    site = find_site(place) if place.startswith(PREFIX) else Site(place, place)
    base = site.base
    listed = get(f"{base}/{INDEX}", site.token)
    if site.tars and listed is not None and FORMAT.encode() not in listed:
        listed = None  # somebody else's file of this name
    folder = cache / re.sub(r"[^\w.-]", "-", re.sub(r"^\w+://", "", site.called))[:80]
    folder = folder.with_name(f"{folder.name}-{hashlib.sha256(listed or site.identity(pattern)).hexdigest()[:12]}")
    if listed is None:
        listing = _survey(site, pattern, folder)
    else:
        listing = _chosen(read_listing(listed, f"{base}/{INDEX}"), pattern, base)
    store = Store(base, folder, listing.files, _room(listing), WINDOW + CONNECTIONS, site.token)

    @functools.cache
    def find(split: str) -> tuple[Places, Labels]:
        if split not in listing.shards:
            raise UserError(f"{address} has no shards of its {split} split, only of {', '.join(listing.shards)}")
        whole = read_places(Path(store.fetch(f"{split}.index.npz")))
        if whole is None:
            raise UserError(f"{base}/{split}.index.npz is damaged on the server: write the set again")
        wanted = [file.file for file in listing.shards[split]]
        return whole[:2] if whole[0].shards == tuple(wanted) else _part(whole[0], whole[1], wanted, base)

    def read(split: str) -> Dataset:
        classes = class_names(Path(store.fetch(CLASSES))) if CLASSES in store.files else ()
        return labeled(name, split, classes, find, lambda places: RemoteEntries(base, places, None, store))

    return list(listing.shards), read


def _survey(site: Site, pattern: str | None, folder: Path) -> Listing:
    """What tars without an `index.json` consist of; it is kept in `folder` as one."""
    base = site.base
    if pattern is None and not site.tars:
        raise UserError(
            f"there is no {base}/{INDEX}: write the set with `vitlab shard`, or name its tars, "
            f"{base}/train-{{000000..000099}}.tar"
        )
    if (folder / INDEX).exists():
        return listing_of(folder / INDEX)
    names = expand(pattern) if pattern else list(site.tars)
    files = [site.tars.get(name) or File(name, size_of(f"{base}/{name}", site.token), "") for name in names]
    store = Store(base, folder, files, _room(Listing({"train": tuple(files)}, (), {}, {})), token=site.token)
    found: dict[str, list[tuple[File, Places, Labels]]] = collections.defaultdict(list)
    for number, name in enumerate(names):
        logger.warning("%s has no %s: fetching its shards once, %d of %d", base, INDEX, number + 1, len(names))
        path = Path(store.fetch(name))
        places, labels = look_through([path])
        found[_split_of(name)].append((File.of(path, len(places)), places, labels))
    beside = []
    for split, each in found.items():
        place = folder / f"{split}.index.npz"
        labels = functools.reduce(Labels.join, (labels for _, _, labels in each))
        write_places(place, Places.joined([places for _, places, _ in each]), labels)
        beside.append(File.of(place))
    if (classes := get(f"{base}/{CLASSES}", site.token)) is not None:
        with replacing_file(folder / CLASSES) as file:
            file.write(classes)
        beside.append(File.of(folder / CLASSES))
    told = ", ".join(f"{split} {len(each)}" for split, each in found.items())
    logger.warning("%s: its shards by their names: %s", base, told)
    listing = Listing({split: tuple(f for f, _, _ in each) for split, each in found.items()}, tuple(beside), {}, {})
    listing.write(folder / INDEX)
    return listing


def _split_of(name: str) -> str:
    """The first word of a tar's name that is a split's, as in `train-000.tar` or `imagenet-validation-00.tar`; train
    where none is."""
    words = re.split(r"[-_.]", name.lower())
    known = {called: split for split, names in SPLIT_FOLDERS.items() for called in names}
    return next((known[word] for word in words if word in known), "train")


def _chosen(listing: Listing, pattern: str | None, base: str) -> Listing:
    if pattern is None:
        return listing
    names = expand(pattern)
    if missing := sorted(set(names) - {file.file for files in listing.shards.values() for file in files}):
        raise UserError(f"{base}/{INDEX} lists no {missing[0]} ({len(missing)} of {len(names)} are missing there)")
    shards = {split: tuple(file for file in files if file.file in names) for split, files in listing.shards.items()}
    return Listing({split: files for split, files in shards.items() if files}, listing.beside, {}, {})


def _part(places: Places, labels: Labels, wanted: Sequence[str], base: str) -> tuple[Places, Labels]:
    """Only the images of some of the shards."""
    if not set(wanted) <= set(places.shards):
        raise UserError(f"{base}: {INDEX} and the index of the images list different shards: write the set again")
    rows = np.flatnonzero(np.isin(places.shard, [places.shards.index(name) for name in wanted]))
    letters = np.frombuffer("".join(map(places.member, rows.tolist())).encode(errors="surrogateescape"), np.uint8)
    records = places.records[[places.shards.index(name) for name in wanted]]
    lengths = np.diff(places.ends)[rows]
    return Places.of_lists(wanted, records, places.offset[rows], places.size[rows], letters, lengths), labels.take(rows)


def expand(pattern: str) -> list[str]:
    """`a-{000..002}.tar` and `{a,b}-0.tar` as a shell does, each name once. Raises `ValueError` for other braces."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices: list[list[str]] = [[part] for part in parts]
    count = 1
    for place in range(1, len(parts), 2):
        if found := re.fullmatch(r"(\d{1,15})\.\.(\d{1,15})", parts[place]):
            first, last = found.groups()
            numbers = range(int(first), int(last) + 1)
            most = max(0, MAX_TARS // count + 1)  # one more than allowed is enough to tell
            choices[place] = [str(n).zfill(len(first)) for n in numbers[:most]]
        else:
            choices[place] = parts[place].split(",") if "," in parts[place] else []
        count *= len(choices[place])
        if count > MAX_TARS:
            raise UserError(f"{pattern} names more than {MAX_TARS:,} tars: write several sets, or larger tars")
        if not choices[place]:
            raise UserError(
                f"{{{parts[place]}}} in {pattern} is no range and no list: write {{000000..000099}} or {{a,b}}"
            )
    return list(dict.fromkeys(map("".join, itertools.product(*choices))))


def _room(listing: Listing) -> int | None:
    """How many bytes of tars may be kept."""
    given = os.environ.get(ROOM)
    if not given:
        return None
    tars = [file.bytes for files in listing.shards.values() for file in files]
    least = (WINDOW + CONNECTIONS + 2) * max(tars)
    if not re.fullmatch(r"\d+(\.\d*)?", given) or (float(given) * 1e9 < least and float(given) * 1e9 < sum(tars)):
        raise UserError(
            f"{ROOM} is {given!r}: give gigabytes, and {least / 1e9:.2g} or more for this set, of which "
            f"{WINDOW + CONNECTIONS + 2} shards have to be here; smaller ones (`vitlab shard --megabytes`) need less"
        )
    return int(float(given) * 1e9)
