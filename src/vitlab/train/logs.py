"""A log of records, one JSON object per line, and beside it a file with the checksum of each line."""

import itertools
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRAINING_KEYS = {"lr", "images_per_s"}
"""A record of training has one of these keys; a record of an evaluation has none."""


def checksum_file(path: Path) -> Path:
    """The file with the checksums of the log `path`: CRC-32, eight hexadecimal digits per line."""
    return path.with_name(f".{path.stem}.crc")


def corrupt_lines(path: Path) -> list[int]:
    """Numbers, from 1, of the lines of a log that do not match their checksums; none if there are no checksums."""
    if not checksum_file(path).exists():
        return []
    pairs = itertools.zip_longest(_lines(path), _lines(checksum_file(path)))
    return [number for number, (line, checksum) in enumerate(pairs, 1) if line is None or _checksum(line) != checksum]


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log, without corrupt lines and an incomplete last line."""
    corrupt = set(corrupt_lines(path))
    records = [_record(line) for number, line in enumerate(_lines(path), 1) if number not in corrupt]
    return [record for record in records if record is not None]


class Log:
    """A log, open for writing; `close` it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not checksum_file(path).exists():  # of an earlier version
            checksum_file(path).write_bytes(b"".join(map(_checksum, _lines(path))))
        self._records, self._checksums = path.open("ab"), checksum_file(path).open("ab")

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one record."""
        line = json.dumps(finite({"step": step, **values}), sort_keys=True).encode() + b"\n"
        for file, content in ((self._records, line), (self._checksums, _checksum(line))):
            file.write(content)
            file.flush()

    def truncate(self, after_step: int, evaluation_due: bool = False) -> list[int]:
        """Removes the records after the last one of at most `after_step`; returns the corrupt lines that remain.

        With `evaluation_due` the record of that step's evaluation is removed too. Unreadable lines stay if a record
        that stays follows them.
        """
        lines, count = _lines(self.path), 0
        checksums = itertools.chain(_lines(checksum_file(self.path)), itertools.repeat(None))
        for number, (line, checksum) in enumerate(zip(lines, checksums, strict=False), 1):
            record = _record(line) if checksum in (None, _checksum(line)) else None
            if record is None:
                continue
            is_evaluation = not record.keys() & TRAINING_KEYS
            if record["step"] > after_step or (evaluation_due and is_evaluation and record["step"] == after_step):
                break
            count = number
        os.truncate(self._records.fileno(), sum(map(len, lines[:count])))
        os.truncate(self._checksums.fileno(), len(_checksum(b"")) * count)
        return corrupt_lines(self.path)

    def sync(self) -> None:
        """Flushes every record to disk."""
        os.fsync(self._records.fileno())
        os.fsync(self._checksums.fileno())

    def close(self) -> None:
        self._records.close()
        self._checksums.close()


def finite(value: Any) -> Any:
    """`value` with null for infinity and NaN, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        return list(file)


def _checksum(line: bytes) -> bytes:
    return b"%08x\n" % zlib.crc32(line)


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if there is none."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
