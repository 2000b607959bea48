import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import Arrays

from vitlab.weights.npz import read_npz, without_ones, write_npz


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Arrays]:
    """A file of some arrays, and these arrays."""
    tensors = {"head/kernel": torch.randn(4, 5), "head/bias": torch.randn(5)}
    write_npz(tmp_path / "vit.npz", tensors)
    return tmp_path / "vit.npz", {name: tensor.numpy() for name, tensor in tensors.items()}


def content(path: Path) -> dict[str, list]:
    return {name: array.tolist() for name, array in read_npz(path).items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_written_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 4).to(dtype).T  # not contiguous
    write_npz(tmp_path / "a.npz", {"a/b": tensor})
    arrays = read_npz(tmp_path / "a.npz")
    assert arrays["a/b"].dtype == dtype
    assert torch.equal(arrays["a/b"], tensor)
    with np.load(tmp_path / "a.npz") as archive:
        assert archive["a/b"].dtype == ("V2" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch."))
    assert read_npz(tmp_path / "a.npz", outline=True)["a/b"].shape == (4, 3)


@pytest.mark.parametrize("prefix", ["opt/target/", "opt/target/params/", "params/"])
def test_a_prefix_is_removed_and_an_optimizer_state_ignored(written: tuple[Path, Arrays], prefix: str) -> None:
    path, arrays = written
    beside: Arrays = {"step": np.array(7), "opt/state/head/bias": np.zeros(5, np.int64)}
    np.savez(path, **{prefix + name: array for name, array in arrays.items()}, **beside)
    assert content(path) == {name: array.tolist() for name, array in arrays.items()}


@pytest.mark.parametrize("dtype", [np.int32, ">f4", "V4", np.complex64])
def test_other_dtypes_are_refused(written: tuple[Path, Arrays], dtype: Any) -> None:
    path, arrays = written
    array = np.zeros(5, dtype)
    np.savez(path, **{**arrays, "head/bias": array})
    with pytest.raises(ValueError, match=rf"head/bias is {re.escape(str(array.dtype))}"):
        read_npz(path)


def test_a_pickled_object_is_never_loaded(written: tuple[Path, Arrays]) -> None:
    path, arrays = written

    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[Path]]:
            return (Path.touch, (path.with_name("exploded"),))

    np.savez(path, **{**arrays, "head/bias": np.array([Bomb()], dtype=object)})
    with pytest.raises(ValueError, match="pickled objects, which are never loaded"):
        read_npz(path)
    assert not path.with_name("exploded").exists()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_refused(written: tuple[Path, Arrays], share: float) -> None:
    path, data = written[0], written[0].read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match=r"vit\.npz cannot be read .*corrupt"):
        read_npz(path)


def test_a_changed_byte_is_detected(written: tuple[Path, Arrays]) -> None:
    path, arrays = written
    data = bytearray(path.read_bytes())
    data[data.find(arrays["head/kernel"].tobytes()) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="CRC"):
        read_npz(path)


def test_compressed_archives_are_read(written: tuple[Path, Arrays]) -> None:
    path, arrays = written
    np.savez_compressed(path, **arrays)
    assert zipfile.ZipFile(path).infolist()[0].compress_type == zipfile.ZIP_DEFLATED
    assert content(path) == {name: array.tolist() for name, array in arrays.items()}


def test_only_leading_ones_of_a_group_norm_are_removed() -> None:
    assert without_ones((1, 1, 1, 64)) == (64,)
    for shape in ((64,), (1, 1, 64), (1, 1, 3, 64), (1, 197, 64), ()):
        assert without_ones(shape) == shape
