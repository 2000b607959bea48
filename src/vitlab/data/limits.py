"""What an image file may cost: limits that no photograph or scan meets, checked before pixels are decoded."""

import struct

MAX_PIXELS = 89_478_485
"""256 MiB of RGB, Pillow's limit."""
MAX_SIDE = 2**16
"""Pixels: a JPEG's largest. A row takes memory of its own, so that a strip takes far more than its pixels."""
DENSE_PIXELS, PIXELS_PER_BYTE = 2**24, 10_000
"""An image of more than the first number has at most the second for each byte of its file. A PNG has at most 8,256."""
MAX_SCANS = 64
"""Most scans of a JPEG: each passes over the whole image. Encoders write 12 at most."""
MAX_PARTS = 2**17
"""Chunks of a PNG, or segments of a JPEG before its pixels: Pillow takes microseconds for an empty one."""
MAX_PROFILES = 16
"""Most color profiles of a PNG, which has one: Pillow decompresses each, a kilobyte to a megabyte."""
MAX_COMMENTS = 100
"""Most comments of a PPM in text: Pillow's time for them is quadratic."""
MAX_COPIES = 16
"""Bytes that all tags of a TIFF or an EXIF block claim together, for each that is there; 1 if it is valid."""
MAX_PPM_HEADER = 4096
"""Bytes with the comments, which Pillow reads one by one."""
MAX_IMAGE_BYTES = 2**30
"""Largest image file."""

_BYTES = (1, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4)  # of a value, by the type of its tag


def size_refusal(width: int, height: int, num_bytes: int) -> str | None:
    """Why an image of so many pixels, in a file of so many bytes, is not decoded; None if it is."""
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
    """Why a file is not decoded, whatever its size in pixels: what takes long, or much memory; None if it is."""
    parts, scans, exif = 0, 0, data
    if data.startswith(b"\x89PNG"):
        at, profiles = 8, 0
        while at < len(data) and parts <= MAX_PARTS:
            profiles += data[at + 4 : at + 8] == b"iCCP"
            at, parts = at + 12 + int.from_bytes(data[at : at + 4], "big"), parts + 1
        if profiles > MAX_PROFILES:
            return f"{profiles:,} color profiles; a PNG has one: save it again"
    elif data.startswith(b"\xff\xd8\xff"):
        parts, scans, exif = _jpeg_parts(data)
    elif data[:2] in (b"P1", b"P2", b"P3") and data.count(b"#") > MAX_COMMENTS:
        return f"more than {MAX_COMMENTS} comments: save it again"
    if parts > MAX_PARTS:
        return f"more than {MAX_PARTS:,} chunks or segments: save it again"
    if scans > MAX_SCANS:
        return f"{scans:,} scans; a JPEG has at most {MAX_SCANS}: save it again"
    return "corrupt: its tags claim many times the bytes that it has" if overlapping_tags(exif) else None


def overlapping_tags(block: bytes) -> bool:
    """Whether the tags of an EXIF block, or of a TIFF, claim together MAX_COPIES times its bytes: Pillow would
    copy them all."""
    block = block.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return False
    start, count, entry = ("8xQ", "Q", "HHQ8x") if b"+" in block[2:4] else ("4xI", "H", "HHI4x")  # 43: a BigTIFF
    start, count, entry = (struct.Struct(order + form) for form in (start, count, entry))
    try:
        (at,) = start.unpack_from(block)
        (number,) = count.unpack_from(block, at)
    except struct.error:
        return False  # Pillow raises for it
    number = min(number, (len(block) - at - count.size) // entry.size)
    claimed = 0
    for i in range(number):
        _, kind, values = entry.unpack_from(block, at + count.size + i * entry.size)
        claimed += min(values * (_BYTES[kind] if kind < len(_BYTES) else 8), len(block))
    return claimed > MAX_COPIES * len(block)


def _jpeg_parts(data: bytes) -> tuple[int, int, bytes]:
    """The number of segments before the first scan; of scans, or 1 where there cannot be several; and the EXIF block,
    whose segments Pillow joins."""
    at, parts, components, progressive, exif = 2, 0, 0, False, b""
    while at + 10 < len(data) and parts <= MAX_PARTS:
        kind, parts, size = data[at + 1], parts + 1, int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at] != 0xFF or kind == 0xFF:  # fill bytes
            at += 1
            continue
        if kind == 0xDA:  # start of a scan
            many_scans = progressive or data[at + 4] < components
            return parts, data.count(b"\xff\xda", at) if many_scans else 1, exif
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # start of the frame
            components, progressive = data[at + 9], kind > 0xC1
        if kind == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            exif += data[at + 10 : at + 2 + size]
        at += 2 + size
    return parts, 0, exif
