"""TFRecord files of `tf.train.Example` messages, read without TensorFlow.

A record is the length of its message (8 bytes), a checksum of these (4), the message, and a checksum of that (4),
all little-endian. A message is protobuf: an Example holds Features, a map of names to lists of bytes, floats or
int64. Bytes are answered with their place in the file, so that a image in it need not be read to be found.
"""

import functools
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

from vitlab.errors import UserError

Data = bytes | mmap
Values = list[slice] | list[int]
"""What a feature holds: places of byte strings in the file, or int64 numbers. Lists of floats are left out."""


def examples(data: Data, path: Path) -> Iterator[dict[str, Values]]:
    """The features of every record in `data`, which are the contents of the file `path`.

    Raises ValueError where a record is damaged or cut off. The checksum of a message is not worked out, for it would
    take longer than all else here: damage within a image is left to its decoder.
    """
    start = 0
    while start < len(data):
        length, stored = data[start : start + 8], data[start + 8 : start + 12]
        stop = start + 12 + int.from_bytes(length, "little")
        if stop + 4 > len(data) or masked_crc32c(length) != int.from_bytes(stored, "little"):
            raise UserError(f"{path} is damaged or cut off at byte {start} of {len(data)}: fetch it again")
        try:
            yield _features(data, slice(start + 12, stop))
        except (IndexError, UnicodeDecodeError, _NoMessageError) as error:
            raise UserError(f"{path} holds no tf.train.Example at byte {start}: fetch it again") from error
        start = stop + 4


def masked_crc32c(data: bytes) -> int:
    """The checksum of the format: CRC-32C (Castagnoli), rotated and shifted by a constant."""
    table, crc = _crc32c_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _crc32c_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


# -------------------------------------------------------------------------------------------------- protobuf


class _NoMessageError(Exception):
    """Bytes that are no protobuf message."""


def _features(data: Data, message: slice) -> dict[str, Values]:
    """Example = {1: Features}, Features = {1: map entry, repeated}, map entry = {1: name, 2: Feature}."""
    features: dict[str, Values] = {}
    for _, whole in _fields(data, message):
        for _, entry in _fields(data, _bytes(whole)):
            named = dict(_fields(data, _bytes(entry)))
            features[data[_bytes(named.get(1))].decode()] = _values(data, _bytes(named.get(2)))
    return features


def _values(data: Data, feature: slice) -> Values:
    """Feature = one of {1: bytes list}, {2: float list}, {3: int64 list}; a list = {1: value, repeated}."""
    values: list[slice] = []
    numbers: list[int] = []
    for kind, content in _fields(data, feature):
        for _, value in _fields(data, _bytes(content)) if kind in (1, 3) else ():
            if kind == 1:
                values.append(_bytes(value))
            elif isinstance(value, int):
                numbers.append(_signed(value))
            else:  # the usual form: all numbers of the list behind each other
                at = value.start
                while at < value.stop:
                    number, at = _varint(data, at)
                    numbers.append(_signed(number))
    return values or numbers


def _fields(data: Data, message: slice) -> Iterator[tuple[int, slice | int]]:
    """Field numbers with their values: an int, or the place of anything longer. Fixed-size numbers are left out."""
    at = message.start
    while at < message.stop:
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
        elif kind == 2:
            size, at = _varint(data, at)
            if at + size > message.stop:
                raise _NoMessageError
            yield number, slice(at, at + size)
            at += size
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise _NoMessageError
    if at > message.stop:
        raise _NoMessageError


def _varint(data: Data, at: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first, the top bit set on all but the last; and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise _NoMessageError


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _bytes(value: slice | int | None) -> slice:
    if not isinstance(value, slice):
        raise _NoMessageError
    return value
