"""What is in a folder: images, broken links and other files.

Skipped are hidden files and folders, system files (`SYSTEM`), and outputs of this package (`OUTPUTS`): a run may be
among the class folders.
"""

import collections
import dataclasses
import functools
import logging
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from vitlab.data.decode import IMAGE_SUFFIXES
from vitlab.errors import UserError, first_ten, quoted, warn_once

logger = logging.getLogger(__name__)

SYSTEM = frozenset(
    ["@eadir", "@recycle", "#recycle", "#snapshot", "$recycle.bin", "recycler", "lost+found", "__macosx", "__pycache__"]  # noqa: RUF005
    + ["system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"]
)
"""Files and folders of file managers, network drives and file systems, in lower case."""
OUTPUTS = {
    "config.json": ("metrics.jsonl", "result.json", "SHA256SUMS", "checkpoints", "model.safetensors", "model"),
    "result.json": ("index.html", "duplicates.jsonl"),
    "study.json": ("report.md",),
    "bench.json": ("bench.json",),
    "index.json": ("SHA256SUMS",),
    "pyvenv.cfg": ("pyvenv.cfg",),
}
"""A run or a model, a report, a study, speeds, shards, a Python environment: it has the first file and another."""
EXPORTS = (".onnx", ".pt2", ".safetensors")
UNREAD = {
    (".heic", ".heif", ".hif"): "install the extra heif (pillow-heif), or convert: heif-convert IN OUT.jpg",
    (".avif",): "install a Pillow with a decoder of AVIF, or convert: avifdec IN OUT.png",
    (".dng", ".nef", ".cr2", ".cr3", ".arw", ".raf", ".orf", ".rw2", ".pef", ".srw", ".raw"): "camera raw: export as "
    "JPEG, or extract the camera's own: exiftool -b -JpgFromRaw -w .jpg FOLDER",
    (".psd", ".xcf", ".ai", ".eps", ".svg", ".pdf"): "export as PNG; pages: pdftoppm -r 150 -png IN.pdf OUT",
    (".jp2", ".j2k", ".jxl", ".exr", ".hdr", ".tga", ".ico", ".dds"): "convert: magick IN OUT.png",
    (".dcm", ".dicom", ".nii", ".mha", ".nrrd", ".svs"): "medical: write windowed slices or tiles as PNG",
    (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".3gp"): "video: extract frames: "
    "ffmpeg -i IN -vf fps=1 OUT-%05d.jpg",
    (".zip", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"): "archive: unpack it",
    (".tar",): "archive: unpack it; WebDataset tars in one folder are read as shards:PATH",
    (".npy", ".npz", ".h5", ".hdf5", ".mat", ".pkl", ".tfrecord"): "arrays: write each image as PNG",
    (".parquet", ".arrow"): "a folder of these is read as hub:PATH",
}
"""Images, or files that hold images, which are not read -> how they can be. Suffixes that are read do not count."""
_HINTS = {suffix: hint for suffixes, hint in UNREAD.items() for suffix in suffixes}


@dataclasses.dataclass
class Contents:
    """Paths of images, sorted, and of broken links; counts of other files by kind: their suffix, or "hidden"."""

    images: list[str]
    broken_links: list[str]
    others: collections.Counter[str]


def contents_of(folder: Path) -> Contents:
    """What is in `folder` and below it. Links are followed, each folder is read once. Raises UserError."""
    contents = Contents([], [], collections.Counter())
    for kind, path in _walk(str(folder), set()):
        if kind == "image":
            contents.images.append(path)
        elif kind == "link":
            contents.broken_links.append(path)
        else:
            contents.others[kind] += 1
    contents.images.sort()
    return contents


def images_below(folder: Path) -> list[str]:
    """All images in `folder` and below it, sorted by path, with broken links, which raise when they are read."""
    look_again()
    contents = contents_of(folder)
    return sorted(contents.images + contents.broken_links)


def has_images(folder: Path, below: bool = True) -> bool:
    """Whether there is an image in `folder`, or with `below` anywhere below it."""
    return any(kind == "image" for kind, _ in _walk(str(folder), set() if below else None))


def _walk(folder: str, seen: set[str] | None) -> Iterator[tuple[str, str]]:
    """Kind ("image", "link", or as in `Contents.others`) and path of each file in `folder`, and below it unless `seen`,
    the folders that have been read, is None."""
    if seen is not None:
        if (real := os.path.realpath(folder)) in seen:  # a link back: following it would have no end
            return
        seen.add(real)
    folders = []
    for entry in _entries(folder):
        if _is_hidden(entry.name):
            if not entry.is_dir():
                yield "hidden", entry.path
        elif _is_broken_link(entry):
            yield "link", entry.path
        elif entry.is_dir():
            folders.append(entry.path)
        else:
            suffix = _suffix(entry.name) or "without a suffix"
            yield "image" if suffix in IMAGE_SUFFIXES else suffix, entry.path.removeprefix("./")
    for path in sorted(folders) if seen is not None else ():
        if not _is_skipped(path):
            yield from _walk(path, seen)


def _entries(folder: str) -> Iterator["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise UserError(f"cannot list the folder {quoted(folder)}: {error.strerror}") from error


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in SYSTEM


def _is_broken_link(entry: "os.DirEntry[str]") -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)  # noqa: PTH110  (a Path is slow)


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122  (a Path for every image is slow)


def _is_skipped(folder: str) -> bool:
    """Whether `folder` is an output of this package, which is logged once."""
    if evidence := _output_evidence(folder):
        shown = quoted(folder.removeprefix("./"))
        warn_once(f"{shown} is skipped: it is not data, but was written by a command (it holds {evidence})")
    return evidence != ""


@functools.cache  # until a data set is opened: every class folder is asked for several times
def _output_evidence(folder: str) -> str:
    """What shows that `folder` is an output (`OUTPUTS`), or holds outputs and no images; "" if it is none."""

    def has(name: str) -> bool:
        return os.path.exists(os.path.join(folder, name))  # noqa: PTH110, PTH118  (a Path for every folder is slow)

    names = (name for name, others in OUTPUTS.items() if has(name) and any(map(has, others)))
    return next(names, "") or ("runs, models or exports" if _holds_only_outputs(folder) else "")


def look_again() -> None:
    """Forgets which folders are outputs: a run may have been written since."""
    _output_evidence.cache_clear()


def _holds_only_outputs(folder: str) -> bool:
    has_outputs = False
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False) and not _is_hidden(entry.name):
            if not _output_evidence(entry.path):
                return False
            has_outputs = True
        elif _suffix(entry.name) in IMAGE_SUFFIXES or entry.is_symlink():
            return False
        else:
            has_outputs |= entry.name == ".lock" or _suffix(entry.name) in EXPORTS or _holds_features(entry.path)
    return has_outputs


def _holds_features(path: str) -> bool:
    """Whether `vitlab features` wrote the file."""
    if not path.endswith(".npz") or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return "features.npy" in archive.namelist()


def subfolders(path: Path) -> list[str]:
    """The sorted names of the folders in `path` that are not skipped. Raises UserError for a missing folder, and for
    broken links, which may have been folders."""
    if not path.is_dir():
        raise UserError(f"there is no folder {quoted(str(path))}")
    visible = [entry for entry in _entries(str(path)) if not _is_hidden(entry.name)]
    require_no_broken_links(path, [entry.path for entry in visible if _is_broken_link(entry)])
    return sorted(entry.name for entry in visible if entry.is_dir() and not _is_skipped(entry.path))


def require_no_broken_links(path: Path, links: list[str]) -> None:
    if links:
        shown = first_ten([f"{link} -> {os.readlink(link)}" for link in sorted(links)])  # noqa: PTH115
        raise UserError(
            f"{quoted(str(path))} has {len(links)} broken links: {shown}; mount or restore what they name, or "
            f"remove them"
        )


def report_ignored(path: Path, ignored: collections.Counter[str]) -> None:
    if ignored:
        text = "%s: %d files are not images and are skipped (%s)"
        logger.warning(text, quoted(str(path)), ignored.total(), _describe(ignored))


def _describe(others: collections.Counter[str]) -> str:
    """`.txt 3, .heic 2 (how to read them)`."""
    hints = {kind: f" ({_HINTS[kind]})" for kind in others if kind in _HINTS}
    return ", ".join(f"{quoted(kind)} {count}{hints.get(kind, '')}" for kind, count in sorted(others.items()))


def no_images_error(folder: Path, others: collections.Counter[str]) -> UserError:
    """What is in a folder without images, and what to do."""
    start = f"the folder {quoted(str(folder))} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})"
    if not others:
        return UserError(f"{start} and no other files: remove it, or fill it")
    return UserError(f"{start}, but {_describe(others)}: convert them to JPEG or PNG, or remove the folder")
