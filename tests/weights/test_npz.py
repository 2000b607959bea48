import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import Arrays

from vitlab.weights.npz import read_npz, write_npz


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Arrays]:
    """A file of some arrays, and these arrays."""
    tensors = {"head/kernel": torch.randn(4, 5), "head/bias": torch.randn(5)}
    write_npz(tmp_path / "vit.npz", tensors)
    return tmp_path / "vit.npz", {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_arrays_are_read_as_written(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 4).to(dtype).T  # not contiguous
    write_npz(tmp_path / "a.npz", {"a/b": tensor})
    arrays = read_npz(tmp_path / "a.npz")
    assert arrays["a/b"].dtype == dtype
    assert torch.equal(arrays["a/b"], tensor)
    with np.load(tmp_path / "a.npz") as archive:
        assert archive["a/b"].dtype == ("V2" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("prefix", ["", "opt/target/", "opt/target/params/", "params/"])
def test_a_prefix_is_removed_and_an_optimizer_state_ignored(written: tuple[Path, Arrays], prefix: str) -> None:
    path, arrays = written
    state: Arrays = {"step": np.array(7), "opt/state/head/bias": np.zeros(5, np.int64)} if prefix else {}
    np.savez_compressed(path, **{prefix + name: array for name, array in arrays.items()}, **state)
    expected = {name: array.tolist() for name, array in arrays.items()}
    assert {name: array.tolist() for name, array in read_npz(path).items()} == expected


@pytest.mark.parametrize("dtype", [np.int32, ">f4", "V4"])
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


def test_a_corrupt_file_is_refused(written: tuple[Path, Arrays]) -> None:
    path, arrays = written
    data = path.read_bytes()
    for part in (0.0, 0.5, 0.99):
        path.write_bytes(data[: int(part * len(data))])
        with pytest.raises(ValueError, match=r"vit\.npz cannot be read .*corrupt"):
            read_npz(path)
    changed = bytearray(data)
    changed[data.find(arrays["head/kernel"].tobytes()) + 5] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ValueError, match="CRC"):
        read_npz(path)
