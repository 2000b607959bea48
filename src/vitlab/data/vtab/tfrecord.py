"""TFRecord files of `tf.train.Example` messages, read without TensorFlow.

A record is the length of its message (8 bytes), a checksum of these (4), the message, and a checksum of that (4),
all little-endian. Byte strings are returned as places in the file, so that an image need not be read to be found.
"""

import functools
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

from vitlab.errors import UserError

Values = list[slice] | list[int]
"""What a feature holds: places of byte strings in the file, or int64 numbers. Lists of floats are left out."""

_BYTES, _INT64, _STRING, _MESSAGE = 12, 3, 9, 11  # types of protobuf's fields
_MESSAGES = {  # message -> its fields: name, number, type, and the message that it holds
    "BytesList": [("value", 1, _BYTES, "")],
    "Int64List": [("value", 1, _INT64, "")],
    "Feature": [("bytes_list", 1, _MESSAGE, "BytesList"), ("int64_list", 3, _MESSAGE, "Int64List")],
    "Entry": [("key", 1, _STRING, ""), ("value", 2, _MESSAGE, "Feature")],  # of the map from names to features
    "Features": [("feature", 1, _MESSAGE, "Entry")],
    "Example": [("features", 1, _MESSAGE, "Features")],
}
_REPEATED = ("BytesList", "Int64List", "Features")


@functools.cache
def _example_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="vitlab/example.proto", package="vitlab", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, inner in fields:
            added = message.field.add(name=field, number=number, type=kind, label=3 if name in _REPEATED else 1)
            if inner:
                added.type_name = f".vitlab.{inner}"  # pyright: ignore[reportArgumentType]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("vitlab.Example"))


def examples(data: bytes | mmap, path: Path) -> Iterator[dict[str, Values]]:
    """The features of every record in `data`, the content of the file `path`. Raises UserError for corrupt records.

    Checksums are not computed: that would take longer than all else here, and an image is checked by its decoder.
    """
    from google.protobuf.message import DecodeError

    start = 0
    while start < len(data):
        stop = start + 12 + int.from_bytes(data[start : start + 8], "little")
        if stop + 4 > len(data):
            raise UserError(f"{path} is corrupt or cut off at byte {start} of {len(data)}: download it again")
        content = bytes(data[start + 12 : stop])
        try:
            example = _example_class().FromString(content)
        except DecodeError as error:
            raise UserError(f"{path} does not hold a tf.train.Example at byte {start}: download it again") from error
        yield {entry.key: _values(entry.value, content, start + 12) for entry in example.features.feature}
        start = stop + 4


def _values(feature: Any, content: bytes, offset: int) -> Values:
    places = [offset + content.find(value) for value in feature.bytes_list.value]
    slices = [slice(at, at + len(value)) for at, value in zip(places, feature.bytes_list.value, strict=True)]
    return slices or list(feature.int64_list.value)
