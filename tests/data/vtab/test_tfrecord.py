"""TFRecord files and Example messages, written here byte by byte from the formats' descriptions."""

import struct
from pathlib import Path
from typing import Any

import pytest

from vitlab.data.vtab import tfrecord

HERE = Path("some.tfrecord")


def varint(value: int) -> bytes:
    value %= 2**64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(value: bytes | int | float, packed: bool = True) -> bytes:
    if isinstance(value, bytes):
        return field(1, field(1, value))
    if isinstance(value, float):
        return field(2, field(1, struct.pack("<f", value)) if packed else varint(1 << 3 | 5) + struct.pack("<f", value))
    return field(3, field(1, varint(value)) if packed else varint(1 << 3) + varint(value))


def message(values: dict[str, bytes | int | float], packed: bool = True) -> bytes:
    entries = [field(1, field(1, name.encode()) + field(2, feature(v, packed))) for name, v in values.items()]
    return field(1, b"".join(entries))


def record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + bytes(4) + content + bytes(4)  # the checksums are not read


def read(data: bytes) -> list[dict]:
    """Bytes as bytes."""
    found = tfrecord.examples(data, HERE)
    return [{k: [data[v] if isinstance(v, slice) else v for v in values] for k, values in e.items()} for e in found]


@pytest.mark.parametrize("packed", [True, False])
def test_examples_are_read_in_order(packed: bool) -> None:
    image = bytes(range(256)) * 3  # long enough for a length of two bytes
    rows = [
        {"image": image, "label": 5, "filename": b"a/b"},
        {"label": -2, "weight": 0.5, "filename": "é".encode(), "image": b""},
        {"label": 2**62},
    ]
    data = b"".join(record(message(row, packed)) for row in rows)
    wanted = [{k: [] if isinstance(v, float) else [v] for k, v in row.items()} for row in rows]
    assert read(data) == wanted


def test_what_protobuf_writes_is_read() -> None:
    """An independent writer: protobuf itself, which tensorboard brings, given the definition of Example."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def define(name: str, *fields: tuple[str, str, bool], inside: str = "") -> None:
        outer = next((m for m in file.message_type if m.name == inside), None)
        made = outer.nested_type.add(name=name) if outer else file.message_type.add(name=name)
        made.options.map_entry = outer is not None
        for number, (key, kind, many) in enumerate(fields, 1):
            one = made.field.add(name=key, number=number, label=3 if many else 1)
            plain = {"float": 2, "int64": 3, "string": 9, "bytes": 12}
            one.type = plain.get(kind, 11)  # pyright: ignore[reportAttributeAccessIssue]
            if kind not in plain:
                one.type_name = f".t.{kind}"

    define("BytesList", ("value", "bytes", True))
    define("FloatList", ("value", "float", True))
    define("Int64List", ("value", "int64", True))
    lists = [("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")]
    define("Feature", *((name, kind, False) for name, kind in lists))
    define("Features", ("feature", "Features.FeatureEntry", True))
    define("FeatureEntry", ("key", "string", False), ("value", "Feature", False), inside="Features")
    define("Example", ("features", "Features", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    example: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))()
    features = example.features.feature
    features["image"].bytes_list.value.extend([b"\x89PNG" * 99, b""])
    features["label"].int64_list.value.extend([3, -1, 2**40])
    features["weight"].float_list.value.append(0.25)
    features["none"].int64_list.SetInParent()
    wanted = {"image": [b"\x89PNG" * 99, b""], "label": [3, -1, 2**40], "weight": [], "none": []}
    assert read(record(example.SerializeToString())) == [wanted]


@pytest.mark.parametrize("cut", [1, 4, 11, 30])
def test_a_file_cut_off_is_damaged(cut: int) -> None:
    data = record(message({"label": 1})) + record(message({"label": 2, "filename": b"x" * 40}))
    with pytest.raises(ValueError, match=r"some.tfrecord is corrupt or cut off at byte 3\d of \d+: download it again"):
        read(data[:-cut])


def test_a_wrong_length_is_seen() -> None:
    data = bytearray(record(message({"label": 1})))
    data[0] -= 1
    with pytest.raises(ValueError, match="at byte 0"):
        read(bytes(data))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 12,  # a varint without an end
        b"\x0a\x7fabc",  # a field longer than its message
        b"\x09abc",  # so is a number
        b"\x0b",  # a type of field that there is not
        field(1, field(1, field(1, b"\xff\xfe") + field(2, feature(1)))),  # a name that is no text
    ],
)
def test_records_of_something_else_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"does not hold a tf\.train\.Example at byte 0"):
        read(record(content))


def test_no_bytes_are_no_examples() -> None:
    assert read(b"") == []
