"""Published sets: where they come from, how they lie on disk, how a missing one is asked for or fetched."""

import hashlib
import http.client
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vitlab.data import web
from vitlab.errors import UserError

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where a set comes from and how it lies on disk.

    folders: where it may lie below the root; what is downloaded goes to the first, which is torchvision's. needed:
    what such a folder holds, as for `locate`; none where that depends on the split. sizes: images of each split of
    TFDS. classes: None where the tasks say what they are. access: "automatic" (downloaded when asked for), "by hand",
    or "license" (by hand, after consent to its terms).
    """

    page: str
    license: str
    folders: tuple[str, ...]
    needed: tuple[str, ...]
    sizes: Mapping[str, int]
    classes: int | None = None
    access: str = "automatic"


SOURCES: dict[str, Source] = {
    "caltech101": Source(
        page="https://data.caltech.edu/records/mzrjq-6wc02",
        license="CC BY 4.0",
        folders=("caltech101/101_ObjectCategories", "101_ObjectCategories", "caltech-101/101_ObjectCategories"),
        needed=("BACKGROUND_Google", "yin_yang"),
        sizes={"train": 3060, "test": 6084},
        classes=102,
    ),
    "cifar100": Source(
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        license="not stated; cite Krizhevsky 2009",
        folders=("cifar-100-binary",),
        needed=("train.bin", "test.bin"),
        sizes={"train": 50_000, "test": 10_000},
        classes=100,
    ),
    "dtd": Source(
        page="https://www.robots.ox.ac.uk/~vgg/data/dtd",
        license="for research",
        folders=("dtd/dtd", "dtd"),
        needed=("images", "labels/train1.txt", "labels/val1.txt", "labels/test1.txt"),
        sizes={"train": 1880, "validation": 1880, "test": 1880},
        classes=47,
    ),
    "flowers102": Source(
        page="https://www.robots.ox.ac.uk/~vgg/data/flowers/102",
        license="not stated; cite Nilsback and Zisserman 2008",
        folders=("flowers-102",),
        needed=("jpg", "imagelabels.mat", "setid.mat"),
        sizes={"train": 1020, "validation": 1020, "test": 6149},
        classes=102,
    ),
    "pets": Source(
        page="https://www.robots.ox.ac.uk/~vgg/data/pets",
        license="CC BY-SA 4.0",
        folders=("oxford-iiit-pet",),
        needed=("images", "annotations/trainval.txt", "annotations/test.txt"),
        sizes={"train": 3680, "test": 3669},
        classes=37,
    ),
    "svhn": Source(
        page="http://ufldl.stanford.edu/housenumbers",
        license="for non-commercial use",
        folders=("svhn",),
        needed=(),  # the file of the split
        sizes={"train": 73_257, "test": 26_032},
        classes=10,
    ),
    "sun397": Source(
        page="https://vision.princeton.edu/projects/2010/SUN",
        license="not stated; cite Xiao et al. 2010",
        folders=("SUN397",),
        needed=("ClassName.txt",),
        sizes={"train": 76_128, "validation": 10_875, "test": 21_750},
        classes=397,
    ),
    "patch_camelyon": Source(
        page="https://zenodo.org/records/2546921",
        license="CC0",
        folders=("pcam",),
        needed=(),  # the two files of the split
        sizes={"train": 262_144, "validation": 32_768, "test": 32_768},
        classes=2,
    ),
    "eurosat": Source(
        page="https://github.com/phelber/EuroSAT",
        license="MIT",
        folders=("eurosat/2750", "2750", "EuroSAT_RGB"),
        needed=("AnnualCrop", "SeaLake"),
        sizes={"train": 27_000},
        classes=10,
    ),
    "resisc45": Source(
        page="https://gcheng-nwpu.github.io (NWPU-RESISC45.rar, to be unpacked)",
        license="not stated; cite Cheng et al. 2017",
        folders=("NWPU-RESISC45",),
        needed=("airplane", "wetland"),
        sizes={"train": 31_500},
        classes=45,
        access="by hand",
    ),
    "diabetic_retinopathy": Source(
        page="https://www.kaggle.com/c/diabetic-retinopathy-detection (train, test and trainLabels.csv, unpacked) and "
        "https://storage.googleapis.com/kaggle-forum-message-attachments/90528/2877/retinopathy_solution.csv",
        license="the competition's rules, to be accepted there",
        folders=("diabetic_retinopathy_detection", "diabetic-retinopathy-detection"),
        needed=(),  # the list and the folder of the split
        sizes={"train": 35_126, "validation": 10_906, "test": 42_670},
        classes=5,
        access="license",
    ),
    "clevr": Source(
        page="https://cs.stanford.edu/people/jcjohns/clevr (CLEVR_v1.0.zip, 18 GB, to be unpacked)",
        license="CC BY 4.0",
        folders=("CLEVR_v1.0", "clevr/CLEVR_v1.0"),
        needed=(),  # the images and the scenes of the split
        sizes={"train": 70_000, "validation": 15_000},
        access="by hand",
    ),
    "dmlab": Source(
        page="https://storage.googleapis.com/dmlab-vtab/dmlab.tar.gz (3 GB, to be unpacked)",
        license="not stated; cite Zhai et al. 2019",
        folders=("dmlab",),
        needed=(),  # the files of the split
        sizes={"train": 65_550, "validation": 22_628, "test": 22_735},
        access="by hand",
    ),
    "kitti": Source(
        page="https://www.cvlibs.net/datasets/kitti/eval_object.php (the left color images data_object_image_2.zip, "
        "12 GB, the labels data_object_label_2.zip, and for the mapping the development kit devkit_object.zip, all to "
        "be unpacked)",
        license="CC BY-NC-SA 3.0",
        folders=("kitti", "KITTI", "Kitti/raw"),
        needed=("training/image_2", "training/label_2", "mapping/train_rand.txt", "mapping/train_mapping.txt"),
        sizes={"train": 6_347, "validation": 423, "test": 711},
        access="license",
    ),
    "dsprites": Source(
        page="https://github.com/google-deepmind/dsprites-dataset",
        license="Apache-2.0",
        folders=("dsprites", "dsprites-dataset"),
        needed=("dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz",),
        sizes={"train": 737_280},
    ),
    "smallnorb": Source(
        page="https://cs.nyu.edu/~ylclab/data/norb-v1.0-small",
        license="for research, not to be sold",
        folders=("smallnorb", "norb-v1.0-small"),
        needed=(),  # the two files of the split
        sizes={"train": 24_300, "test": 24_300},
    ),
}
"""The sets of VTAB. Those with `classes` are sets of their own as well; of the others there are the tasks only."""


def cache_folder() -> Path:
    """Where sets lie that are given no root."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitlab"


def require_split(name: str, split: str) -> None:
    """Raise `ValueError` for a split that TFDS does not have."""
    if split not in SOURCES[name].sizes:
        raise UserError(f"{name} has the splits {', '.join(SOURCES[name].sizes)}, not {split!r}")


def locate(
    name: str,
    split: str,
    root: Path,
    download: bool,
    get: str | Mapping[str, str] | None = None,
    needed: Sequence[str] = (),
) -> Path:
    """The folder, `root` or one that `SOURCES` tells below it, that has all of `needed`.

    needed: paths or patterns; " or " stands between those of which one is enough. `SOURCES` says what unless given.
    get: what downloads a set whose access is automatic: a class of torchvision.datasets, or the URLs of its files with
    the digest of each.
    """
    require_split(name, split)
    source = SOURCES[name]
    assert (get is None) == (source.access != "automatic"), name
    places = list(dict.fromkeys([root, *(root / folder for folder in (*source.folders, name))]))
    home, missing = _nearest(places, needed or source.needed)
    if not missing:
        return home
    what = f"{' and '.join(missing)} (from {source.page}; license: {source.license})"
    if get is None:
        consent = ", after consent to its license," if source.access == "license" else ""
        raise UserError(
            f"{name} needs {what}, which has{consent} to be fetched by hand; looked in {', '.join(map(str, places))}: "
            "put it there, or give another root"
        )
    require_download(name, what, places, download)
    if isinstance(get, str):
        download_by_torchvision(get, root)
    else:
        for url, digest in get.items():
            download_file([url], places[1], digest)
    home, missing = _nearest(places, needed or source.needed)
    if missing:
        raise UserError(f"{name} was downloaded, but {' and '.join(missing)} is not in {home}: fetch it by hand")
    return home


def _nearest(places: Sequence[Path], needed: Sequence[str]) -> tuple[Path, list[str]]:
    """The place that lacks least, the first of several, and what it lacks."""
    assert needed
    lacking = [
        [part for part in needed if not any(any(place.glob(each)) for each in part.split(" or "))] for place in places
    ]
    return min(zip(places, lacking, strict=True), key=lambda found: len(found[1]))


def require_download(name: str, what: str, places: Sequence[Path], download: bool) -> None:
    """Raise `ValueError` unless what the set `name` lacks in `places` may be downloaded."""
    looked = f"{name} needs {what}; looked in {', '.join(map(str, places))}"
    if not download:
        raise UserError(f"{looked}: put it there, give another root, or allow the download")
    logger.warning("%s: downloading it", looked)


def download_file(urls: Sequence[str], folder: Path, digest: str) -> None:
    """Put a file into `folder`, unless it is there, from the first of `urls` that has it right.

    digest: "md5:..." or "sha256:...".
    """
    from torchvision.datasets.utils import download_url  # slow to import, and seldom needed

    errors = []
    for url in urls:
        path = folder / url.rpartition("/")[2]
        part = path.with_name(f"{path.name}.part")
        try:
            if path.is_file() and digest_of(path, digest) == digest:
                return
            part.unlink(missing_ok=True)  # what is left of a run that was killed
            with web.guarded_urlopen():
                download_url(url, str(folder), part.name)
            if (found := digest_of(part, digest)) == digest:
                part.replace(path)
                return
            errors.append(f"{url}: it has the sum {found}, not {digest}")
        except (OSError, RuntimeError, http.client.HTTPException, UserError) as error:  # no network, or a refusal
            errors.append(f"{url}: {error}")
        finally:
            part.unlink(missing_ok=True)
    raise UserError(f"could not download ({'; '.join(errors)}): fetch the file elsewhere and put it into {folder}")


def digest_of(path: Path, like: str) -> str:
    """The digest of a file in the form of `like`: "md5:..." or "sha256:..."."""
    kind = like.partition(":")[0]
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def download_by_torchvision(dataset: str, root: Path) -> None:
    """Let the class `dataset` of torchvision.datasets fetch and unpack its set below `root`. Raises `ValueError`."""
    import torchvision.datasets  # slow to import, and seldom needed

    try:
        with web.guarded_urlopen():
            getattr(torchvision.datasets, dataset)(root, download=True)
    except (OSError, RuntimeError, http.client.HTTPException, UserError) as error:
        raise UserError(
            f"torchvision could not download {dataset} ({error}): fetch it elsewhere and unpack it into {root}"
        ) from error
