"""Files of pixels -> arrays: idx (Fashion-MNIST), CIFAR's binary version, MATLAB (SVHN), HDF5 (PatchCamelyon).

No pickle is ever loaded; CIFAR is therefore read from its binary version. A corrupt file raises one of many errors,
`vtab.tasks.READ_ERRORS`.
"""

import gzip
import shutil
from pathlib import Path

import numpy as np

from vitlab.errors import UserError
from vitlab.io import replacing_file


def read_idx(path: Path) -> np.ndarray:
    """An idx file of bytes, or PATH.gz: two zeros, type 8, number of axes; the axes' sizes, big-endian; the data."""
    data = path.read_bytes() if path.is_file() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} is not an idx file of bytes")
    shape = np.frombuffer(data, ">u4", data[3], offset=4).tolist()
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def read_cifar(files: list[Path], label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N, 32, 32, 3] and labels int64 [N]: records of labels, the last of which counts, and 3 planes."""
    records = np.concatenate([np.fromfile(file, np.uint8) for file in files]).reshape(-1, label_bytes + 3 * 32 * 32)
    pixels = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), records[:, label_bytes - 1].astype(np.int64)


def read_mat(path: Path, *names: str) -> list[np.ndarray]:
    """The arrays `names` of a MATLAB file."""
    import scipy.io  # slow to import
    from scipy.io.matlab import MatReadError

    try:
        content = scipy.io.loadmat(path)
    except MatReadError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return [content[name] for name in names]


def read_svhn(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N, 32, 32, 3] and labels int64 [N] of an SVHN file, in which the digit 0 is the label 10."""
    pixels, labels = read_mat(path, "X", "y")
    return np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)), labels[:, 0].astype(np.int64) % 10


def read_h5(path: Path, name: str) -> np.ndarray:
    """The array `name` of an HDF5 file, or of `path`.gz, which is unpacked beside it first.

    It is mapped into memory, so that a few images of many cost little: from an .npy beside the file, as the published
    files are compressed.
    """
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"{path} is an HDF5 file, and h5py is not installed: pip install 'vitlab[vtab]'") from error
    plain = path.with_name(f"{path.name}.{name}.npy")
    if not path.is_file():
        with gzip.open(f"{path}.gz") as packed, replacing_file(path) as file:
            shutil.copyfileobj(packed, file)
    if not plain.is_file():
        with h5py.File(path) as file, replacing_file(plain) as copy:
            array = file[name]
            assert isinstance(array, h5py.Dataset)
            header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
            np.lib.format.write_array_header_1_0(copy, header)
            for start in range(0, len(array), 1024):
                copy.write(array[start : start + 1024].tobytes())
    return np.load(plain, "r", allow_pickle=False)
