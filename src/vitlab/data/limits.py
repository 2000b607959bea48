"""What an image file may cost: limits that no photograph or scan meets, checked before pixels are decoded."""

import struct

MAX_PIXELS = 89_478_485  # 256 MiB of RGB, Pillow's limit
MAX_SIDE = 2**16
"""Pixels: a JPEG's largest. A row takes memory of its own, so that a strip takes far more than its pixels."""
DENSE_PIXELS, PIXELS_PER_BYTE = 2**24, 10_000
"""An image of more than the first number has at most the second for each byte of its file. A PNG has at most 8,256."""
MAX_SCANS = 64  # most scans of a JPEG: each passes over the whole image. Encoders write 12 at most.
MAX_PARTS = 2**17
"""Chunks of a PNG, or segments of a JPEG before its pixels: Pillow takes microseconds for an empty one."""
MAX_PROFILES = 16  # most color profiles of a PNG, which has one: Pillow decompresses each, a kilobyte to a megabyte
MAX_COMMENTS = 100  # most comments of a PPM in text: Pillow's time for them is quadratic
MAX_COPIES = 16
"""Bytes that all tags of a TIFF or an EXIF block claim together, for each that is there; 1 if it is valid."""
MAX_PPM_HEADER = 4096  # bytes with the comments, which Pillow reads one by one
MAX_IMAGE_BYTES = 2**30  # largest image file

_VALUE_BYTES = (1, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4)  # bytes of a value of a tag, by the tag's type


def size_refusal(width: int, height: int, num_bytes: int) -> str | None:
    """The reason to refuse an image of this size in pixels, in a file of `num_bytes`; None to accept it."""
    if (pixels := width * height) > MAX_PIXELS:
        return f"{width} x {height} pixels, more than the {MAX_PIXELS:,} allowed"
    if max(width, height) > MAX_SIDE:
        return f"{width} x {height} pixels; a side has at most {MAX_SIDE:,}: cut the strip"
    if pixels > max(DENSE_PIXELS, PIXELS_PER_BYTE * num_bytes):
        return (
            f"{width} x {height} pixels in {num_bytes:,} bytes: it is corrupt or has no content (above {DENSE_PIXELS:,}"
            f" pixels, a byte holds at most {PIXELS_PER_BYTE:,})"
        )
    return None


def content_refusal(data: bytes) -> str | None:
    """The reason to refuse a file that takes too long or too much memory whatever its size; None to accept it."""
    too_many_parts = f"more than {MAX_PARTS:,} chunks or segments: save it again"
    tags = data  # of a TIFF; other formats have none there
    if data.startswith(b"\x89PNG"):
        chunks, profiles = _count_png_chunks(data)
        if profiles > MAX_PROFILES:
            return f"{profiles:,} color profiles; a PNG has one: save it again"
        if chunks > MAX_PARTS:
            return too_many_parts
    elif data.startswith(b"\xff\xd8\xff"):
        segments, scans, tags = _read_jpeg_segments(data)
        if segments > MAX_PARTS:
            return too_many_parts
        if scans > MAX_SCANS:
            return f"{scans:,} scans; a JPEG has at most {MAX_SCANS}: save it again"
    elif data[:2] in (b"P1", b"P2", b"P3") and data.count(b"#") > MAX_COMMENTS:
        return f"more than {MAX_COMMENTS} comments: save it again"
    return "corrupt: its tags claim many times the bytes that it has" if overlapping_tags(tags) else None


def _count_png_chunks(data: bytes) -> tuple[int, int]:
    """The number of chunks, or MAX_PARTS + 1, and of color profiles among them."""
    start, chunks, profiles = 8, 0, 0
    while start < len(data) and chunks <= MAX_PARTS:
        profiles += data[start + 4 : start + 8] == b"iCCP"
        start += 12 + int.from_bytes(data[start : start + 4], "big")
        chunks += 1
    return chunks, profiles


def _read_jpeg_segments(data: bytes) -> tuple[int, int, bytes]:
    """The number of segments before the first scan; of scans, or 1 where there cannot be several; and the EXIF block,
    whose segments Pillow joins."""
    start, segments, components, progressive, exif = 2, 0, 0, False, b""
    while start + 10 < len(data) and segments <= MAX_PARTS:
        segments += 1
        kind = data[start + 1]
        if data[start] != 0xFF or kind == 0xFF:  # fill bytes
            start += 1
            continue
        end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        if kind == 0xDA:  # start of a scan
            many_scans = progressive or data[start + 4] < components
            return segments, data.count(b"\xff\xda", start) if many_scans else 1, exif
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # start of the frame
            components, progressive = data[start + 9], kind > 0xC1
        if kind == 0xE1 and data[start + 4 : start + 10] == b"Exif\0\0":
            exif += data[start + 10 : end]
        start = end
    return segments, 0, exif


def overlapping_tags(block: bytes) -> bool:
    """Whether the tags of an EXIF block, or of a TIFF, claim together more than MAX_COPIES times its bytes: Pillow
    would copy them all."""
    block = block.removeprefix(b"Exif\0\0")
    byte_order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if byte_order is None:
        return False
    is_big_tiff = b"+" in block[2:4]
    formats = ("8xQ", "Q", "HHQ8x") if is_big_tiff else ("4xI", "H", "HHI4x")
    header, tag_count, tag = (struct.Struct(byte_order + each) for each in formats)
    try:
        (start,) = header.unpack_from(block)
        (count,) = tag_count.unpack_from(block, start)
    except struct.error:
        return False  # Pillow raises for it
    start += tag_count.size
    claimed = 0
    for i in range(min(count, (len(block) - start) // tag.size)):
        _, kind, values = tag.unpack_from(block, start + i * tag.size)
        claimed += min(values * (_VALUE_BYTES[kind] if kind < len(_VALUE_BYTES) else 8), len(block))
    return claimed > MAX_COPIES * len(block)
