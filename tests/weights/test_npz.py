import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vitlab.weights.npz import last_axis, need, read_npz, without_ones, write_npz

Arrays = dict[str, Any]
"""Name -> np.ndarray."""


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Arrays]:
    """A file of some arrays, and these arrays to be put right or wrong."""
    arrays = {"head/kernel": np.random.randn(4, 5), "head/bias": np.random.randn(5)}  # noqa: NPY002
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    write_npz(tmp_path / "vit.npz", {name: torch.from_numpy(array) for name, array in arrays.items()})
    return tmp_path / "vit.npz", arrays


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_written_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 4).to(dtype).T  # not contiguous
    write_npz(tmp_path / "a.npz", {"a/b": tensor})
    back = read_npz(tmp_path / "a.npz")
    assert back.keys() == {"a/b"}
    assert back["a/b"].dtype == dtype
    assert torch.equal(back["a/b"], tensor)
    with np.load(tmp_path / "a.npz") as archive:
        assert archive["a/b"].dtype == ("V2" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("prefix", ["opt/target/", "opt/target/params/", "params/"])
def test_a_prefix_is_taken_off_and_what_stands_beside_it_left(written: tuple[Path, Arrays], prefix: str) -> None:
    path, arrays = written
    named: Arrays = {prefix + name: array for name, array in arrays.items()}
    beside: Arrays = {"step": np.array(7), "opt/state/head/bias": np.zeros(5, np.int64)}
    np.savez(path, **named, **beside)
    assert {name: array.tolist() for name, array in read_npz(path).items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


@pytest.mark.parametrize(
    "array", [np.zeros(5, np.int32), np.zeros(5, ">f4"), np.zeros(5, "V4"), np.zeros(5, np.complex64)]
)
def test_numbers_of_another_type_are_refused(written: tuple[Path, Arrays], array: np.ndarray) -> None:
    path, arrays = written
    np.savez(path, **{**arrays, "head/bias": array})
    with pytest.raises(ValueError, match=rf"head/bias is {re.escape(str(array.dtype))}; weights are arrays of"):
        read_npz(path)


def test_a_pickled_object_is_never_loaded(written: tuple[Path, Arrays]) -> None:
    path, arrays = written

    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (Path.touch, (path.with_name("exploded"),))  # pyright: ignore[reportReturnType]

    np.savez(path, **{**arrays, "head/bias": np.array([Bomb()], dtype=object)})
    with pytest.raises(ValueError, match="pickled objects, which are never loaded"):
        read_npz(path)
    assert not path.with_name("exploded").exists()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_told(written: tuple[Path, Arrays], share: float) -> None:
    path, _ = written
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match=r"vit\.npz cannot be read .*damaged"):
        read_npz(path)


def test_a_changed_byte_is_told(written: tuple[Path, Arrays]) -> None:
    path, arrays = written
    data = bytearray(path.read_bytes())
    found = data.find(arrays["head/kernel"].tobytes())
    data[found + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="CRC"):
        read_npz(path)


def test_compressed_archives_are_read(written: tuple[Path, Arrays]) -> None:
    path, arrays = written
    np.savez_compressed(path, **arrays)
    assert zipfile.ZipFile(path).infolist()[0].compress_type == zipfile.ZIP_DEFLATED
    assert {name: array.tolist() for name, array in read_npz(path).items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


def test_what_sizes_are_read_from_must_be_there() -> None:
    arrays = {"a": torch.zeros(2, 3), "empty": torch.zeros(0, 3), "none": torch.zeros(())}
    need(Path("x.npz"), arrays, {"a": 2}, "thing")
    for wanted, said in (({"a": 2, "b": 1}, "b is missing"), ({"a": 3}, r"a is of shape \(2, 3\)")):
        with pytest.raises(ValueError, match=rf"x.npz is no thing of Google's: {said}.*It holds a, empty, none"):
            need(Path("x.npz"), arrays, wanted, "thing")
    with pytest.raises(ValueError, match=r"empty is of shape \(0, 3\)"):
        need(Path("x.npz"), arrays, {"empty": 2}, "thing")
    assert [last_axis(arrays, name) for name in ("a", "none", "missing")] == [3, None, None]


def test_only_leading_ones_of_a_group_norm_are_left_out() -> None:
    assert without_ones((1, 1, 1, 64)) == (64,)
    for shape in ((64,), (1, 1, 64), (1, 1, 3, 64), (1, 197, 64), ()):
        assert without_ones(shape) == shape
