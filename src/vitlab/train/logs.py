"""A file of records, one JSON object a line, and beside it a file with the checksum of each line."""

import itertools
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

TRAINING_RECORD = {"lr", "images_per_s"}
"""A record of training has one of these; a record of an evaluation has none."""


def checksum_file(path: Path) -> Path:
    """Where the checksums of the log `path` are: eight hexadecimal digits (CRC-32) a line."""
    return path.with_name(f".{path.stem}.crc")


def damaged_lines(path: Path) -> list[int]:
    """Numbers, from 1, of the lines of a log that do not match their checksums; none where there are no checksums."""
    sums = checksum_file(path)
    if not sums.exists():
        return []
    pairs = itertools.zip_longest(_lines(path), _lines(sums))
    return [number for number, (line, checksum) in enumerate(pairs, 1) if line is None or _checksum(line) != checksum]


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log, without its damaged lines and without half a line at its end."""
    damaged = set(damaged_lines(path))
    records = [_record(line) for number, line in enumerate(_lines(path), 1) if number not in damaged]
    return [record for record in records if record is not None]


class Log:
    """A log, open for writing. `close` it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not checksum_file(path).exists():  # of an older version
            checksum_file(path).write_bytes(b"".join(map(_checksum, _lines(path))))
        self._records: BinaryIO = path.open("ab")
        self._sums: BinaryIO = checksum_file(path).open("ab")

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one record."""
        line = json.dumps(finite({"step": step, **values}), sort_keys=True).encode() + b"\n"
        for file, content in ((self._records, line), (self._sums, _checksum(line))):
            file.write(content)
            file.flush()

    def truncate(self, after_step: int, evaluation_due: bool = False) -> list[int]:
        """Cuts the records that follow the last one of at most this step; returns the damaged ones of those that stay.

        With `evaluation_due`, the record of that step's evaluation goes too: it will be made again. A line that cannot
        be read stays where it is followed by one that stays.
        """
        lines, kept = _lines(self.path), 0
        sums = itertools.chain(_lines(checksum_file(self.path)), itertools.repeat(None))
        for number, (line, checksum) in enumerate(zip(lines, sums, strict=False), 1):
            record = _record(line) if checksum in (None, _checksum(line)) else None
            if record is None:
                continue
            of_evaluation = not record.keys() & TRAINING_RECORD
            if record["step"] > after_step or (evaluation_due and of_evaluation and record["step"] == after_step):
                break
            kept = number
        os.truncate(self._records.fileno(), sum(map(len, lines[:kept])))
        os.truncate(self._sums.fileno(), len(_checksum(b"")) * kept)
        return damaged_lines(self.path)

    def sync(self) -> None:
        """Brings every record to the disk."""
        for file in (self._records, self._sums):
            os.fsync(file.fileno())

    def close(self) -> None:
        self._records.close()
        self._sums.close()


def finite(value: Any) -> Any:
    """JSON knows no infinity and no NaN: they become null."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        return list(file)


def _checksum(line: bytes) -> bytes:
    return b"%08x\n" % zlib.crc32(line)


def _record(line: bytes) -> dict[str, Any] | None:
    """A record; None for a line that is none."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
