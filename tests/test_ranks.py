import socket

import pytest
from program import call

from vitlab.errors import UserError
from vitlab.ranks import is_rank_0, rank_number, world_size
from vitlab.train.distributed import init_distributed, world_from_environment

JOB = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, size in {"": 1, "1": 1, "4": 4}.items():
        monkeypatch.setenv("WORLD_SIZE", text)
        assert world_size() == size
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "x")  # set for another program: this one is alone, and prints
    assert (world_size(), is_rank_0(), rank_number("NONE", 0, 9, default=3)) == (1, True, 3)


@pytest.mark.parametrize("text", ["x", "0", "-1", "2.0", "9" * 5000])
def test_a_world_size_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    code, _, err = call(capsys, "list", "models")
    assert (code, "WORLD_SIZE is" in err, "Unset WORLD_SIZE" in err) == (2, True, True)


@pytest.mark.parametrize(
    ("name", "text"),
    [("RANK", "2"), ("LOCAL_RANK", "-1"), ("LOCAL_RANK", ""), ("MASTER_PORT", "x"), ("MASTER_ADDR", None)],
)
def test_variables_out_of_range_or_missing(name: str, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in JOB.items():
        monkeypatch.setenv(variable, value)
    if text is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=name):
        world_from_environment()


def test_a_port_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        for variable, value in (JOB | {"MASTER_PORT": str(other.getsockname()[1])}).items():
            monkeypatch.setenv(variable, value)
        with pytest.raises(UserError, match=r"MASTER_PORT.*free port"), init_distributed():
            pytest.fail("it was joined")
