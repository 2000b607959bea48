"""Checksums of a folder's files, in SHA256SUMS.

`Workdir.write_result` writes them at the end of a run, for the files that `train/run_files.py` lists.
"""

import hashlib
import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from vitlab.io import write_bytes

logger = logging.getLogger(__name__)
SUMS = "SHA256SUMS"
"""File of a folder's checksums, in the format of `sha256sum --check`."""
MISSING = "is missing"


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, names: Iterable[str], drop: Collection[str] = ()) -> None:
    """Writes the checksums of these files of a folder to SHA256SUMS; the entries of others stay, but those to `drop`.

    The last line is a comment with the checksum of the lines before.
    """
    sums = {name: digest for name, digest in read_sums(folder).items() if name not in drop}
    sums |= {name: sha256(folder / name) for name in names}
    text = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
    write_bytes(folder / SUMS, f"{text}# {hashlib.sha256(text.encode()).hexdigest()}\n".encode())


def read_sums(folder: Path) -> dict[str, str]:
    """Name -> checksum of each file in SHA256SUMS; empty if it is missing, or corrupt (with a warning)."""
    path = folder / SUMS
    if not path.exists():
        return {}
    text, _, last = path.read_bytes().rpartition(b"# ")
    if last != f"{hashlib.sha256(text).hexdigest()}\n".encode():
        logger.warning(
            "%s is corrupt: it does not match its own checksum, so no file can be checked. Delete it; the next start "
            "of the run writes it again from the present files.",
            path,
        )
        return {}
    return {name: digest for digest, _, name in (line.partition("  ") for line in text.decode().splitlines())}


def find_corrupt_files(folder: Path, names: Collection[str] | None = None) -> dict[str, str]:
    """Files of `folder` (default: all in SHA256SUMS) that do not match their checksum: name -> problem."""
    damage = {}
    for name, digest in read_sums(folder).items():
        if names is not None and name not in names:
            continue
        try:
            if sha256(folder / name) != digest:
                damage[name] = "does not match its checksum"
        except FileNotFoundError:
            damage[name] = MISSING
        except OSError as error:
            damage[name] = f"cannot be read ({error.strerror})"
    return damage
