"""Writes the names of ImageNet's classes that come with the package, from the tables of an installed timm.

    python benchmarks/imagenet_classes.py

timm has the WordNet ids of each list in the order of its heads, and the lemmas of each id.
"""

import collections
import lzma
from pathlib import Path

import timm.data

import vitlab.weights.imagenet_classes
from vitlab.io import write_bytes
from vitlab.weights.imagenet_classes import LISTS, TABLE

INFO = Path(timm.data.__file__).with_name("_info")
FILES = {1_000: "imagenet", 11_821: "imagenet12k", 21_841: "imagenet22k", 21_843: "imagenet21k_goog"}


def main() -> None:
    lists = {outputs: (INFO / f"{name}_synsets.txt").read_text().split() for outputs, name in FILES.items()}
    for outputs, ids in lists.items():
        assert len(ids) == outputs
        assert ids == sorted(set(ids))
    rows = (line.split("\t") for line in (INFO / "imagenet_synset_to_lemma.txt").read_text().splitlines())
    lemmas = {wnid: lemma.split(", ") for wnid, lemma in rows}
    ids = sorted(set().union(*lists.values()))
    firsts = collections.Counter(lemmas[wnid][0] for wnid in ids)
    others = collections.Counter(tuple(lemmas[wnid]) for wnid in ids)
    lines = []
    members = {outputs: set(listed) for outputs, listed in lists.items()}
    for wnid in ids:
        first, *rest = lemmas[wnid]
        bits = sum(LISTS[outputs] for outputs in lists if wnid in members[outputs])
        distinct = ", ".join(rest) if rest and others[(first, *rest)] == 1 else wnid
        lines.append(f"{bits:x}{first}" + (f"\t{distinct}" if firsts[first] > 1 else ""))
    data = lzma.compress("\n".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
    write_bytes(Path(vitlab.weights.imagenet_classes.__file__).with_name(TABLE), data)
    print(f"{len(lines):,} classes, {len(data):,} bytes")


if __name__ == "__main__":
    main()
