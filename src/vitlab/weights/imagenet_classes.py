"""The names of ImageNet's classes, in the order of every published head: by their WordNet ids."""

import collections
import lzma
from pathlib import Path

TABLE = "imagenet_classes.txt.xz"
"""A line for each class of the union of all lists, in the order of WordNet ids: a hexadecimal digit, the sum of its
lists' bits; its first WordNet lemma; and where another class has the same, a tab and what tells them apart: its other
lemmas, or else its id. Written by benchmarks/imagenet_classes.py; the lemmas are WordNet's (see NOTICE)."""
LISTS = {1_000: 1, 11_821: 2, 21_841: 4, 21_843: 8}
"""Number of outputs -> bit of the list: ImageNet-1k; timm's ImageNet-12k; ImageNet-22k (without two classes that have
no images any more); Google's ImageNet-21k."""


def imagenet_names(outputs: int) -> tuple[str, ...]:
    """The names of so many outputs, each once; none where no list of ImageNet has as many."""
    if outputs not in LISTS:
        return ()
    text = lzma.decompress(Path(__file__).with_name(TABLE).read_bytes()).decode()
    rows = [line[1:].split("\t") for line in text.splitlines() if int(line[0], 16) & LISTS[outputs]]
    count = collections.Counter(first for first, *_ in rows)
    return tuple(first if count[first] == 1 else f"{first} ({rest[0]})" for first, *rest in rows)
