"""Fixtures of all tests: shapes and types checked at each call, fixed seeds, the folder of shared files."""

import functools
import gc
import inspect
import multiprocessing
import os
import random
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
from jaxtyping import install_import_hook

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "studies")]  # for `program`, `small_study`

# Before the first import of vitlab: from here on every annotated shape and type is checked when called.
install_import_hook("vitlab", "type_checks.when_called")

# Otherwise each worker and each process that a test starts compiles torch and the tests anew: half a minute.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.pop("COLUMNS", None)  # pytest's workers have one, and tables would be as narrow


def _read_once(get_source: Callable[[Any], str]) -> Callable[[Any], str]:
    """Searches the source of a class once; tyro does so at each call, for each class of settings."""
    found: dict[tuple[str, str], str | None] = {}

    @functools.wraps(get_source)
    def get(what: Any) -> str:
        if not inspect.isclass(what) or "<locals>" in what.__qualname__:
            return get_source(what)
        name = (what.__module__, what.__qualname__)
        if name not in found:
            try:
                found[name] = get_source(what)
            except OSError:  # of a class that was made from others there is none
                found[name] = None
        if (source := found[name]) is None:
            raise OSError(f"{what} has no source")
        return source

    return get


inspect.getsource = _read_once(inspect.getsource)
# Thousands of waits for a disk; what a process has written stays when it is killed.
os.fsync = lambda _: None

SHARED = Path(__file__).parents[2] / "shared"
"""Golden files and data sets that are too large for the repository; they stand beside it, or nowhere."""


LONGEST = (
    *("test_documents", "test_cli", "test_export", "test_notebook", "studies", "finetuning", "train", "models"),
    *("runs", "test_bombs", "commands"),
)
"""Files and folders that take longest: they come first, so that no worker is left alone with one in the end."""


@functools.cache
def prepare_libraries() -> None:
    import torch
    from hypothesis import settings

    torch.set_num_threads(1)  # small models gain nothing from more, and sums come out in the same order everywhere
    # The first backward pass of a process decides which threads autograd has. After a FakeTensorMode (torch.compile,
    # meta models) there would be eight, for devices that do not exist, and no process forked later (`in_ranks`) could
    # train.
    torch.ones((), requires_grad=True).backward()
    if not torch.cuda.is_available():
        # Else each test and each step of a training writes down its stack three times, for devices that may come.
        torch.manual_seed = torch.default_generator.manual_seed
    settings.register_profile("vitlab", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("vitlab")


def pytest_collectstart() -> None:
    """Only in processes that run tests: the one that hands them out needs no libraries."""
    prepare_libraries()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        names = [part.removesuffix(".py") for part in item.path.parts]
        return next((i for i, name in enumerate(LONGEST) if name in names), len(LONGEST))

    items.sort(key=rank)
    gc.freeze()  # what is imported stays; to look at its millions of objects again and again takes a tenth of the time


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries report what nobody has released


@pytest.fixture(scope="session", autouse=True)
def _same_on_every_machine() -> Iterator[None]:
    """On every processor `auto` is float32 and layers are not packed: a test that wants either asks for it."""
    from vitlab.train import precision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "cpu_is_faster_in_bfloat16", lambda: False)
        patch.setattr(precision, "cpu_is_faster_packed", lambda dtype: False)
        yield


@pytest.fixture(autouse=True)
def _digits_read_once() -> None:
    """Once scikit-learn is imported: its digits are read from a file of text, and hundreds of tests load them."""
    datasets: Any = sys.modules.get("sklearn.datasets")
    if datasets and not hasattr(datasets.load_digits, "cache_info"):
        datasets.load_digits = functools.cache(datasets.load_digits)


@pytest.fixture(autouse=True)
def _checked_types() -> None:
    from type_checks import check_again

    check_again()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (for libraries that draw from it)
    torch.manual_seed(0)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are not checked, as outside of the tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    from inside import unrender

    unrender(monkeypatch)


@pytest.fixture
def in_ranks() -> Callable[[int, Callable[[], Any]], list[Any]]:
    """`in_ranks(count, job)` runs `job` in so many processes, each with the environment of torchrun, on the loopback
    device; returns what each returned, or the ValueError, RuntimeError or SystemExit that it raised."""

    def run(count: int, job: Callable[[], Any]) -> list[Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
        context = multiprocessing.get_context("fork")  # all that takes long to import is there already
        started = []
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            ranks = {name: str(value) for name, value in ranks.items()}
            process = context.Process(target=answer, args=(job, place | ranks, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        answers = [ours.recv() if ours.poll(200) else "nothing after 200 s" for _, ours in started]
        for process, _ in started:
            process.join(10)
            process.kill()
        return answers

    def answer(job: Callable[[], Any], environment: dict[str, str], pipe: Any) -> None:
        os.environ.update(environment)
        try:
            pipe.send(job())
        except (ValueError, RuntimeError, SystemExit) as error:
            pipe.send(error)

    return run


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared files; the test is skipped where there is none."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the golden files and data sets in {SHARED.name}/ beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run that has ended."""
    from program import SMALL

    from vitlab.cli import main

    folder = tmp_path_factory.mktemp("cli") / "run"
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", "tiny-digits", "--workdir", str(folder), "--steps", "3", *SMALL])
    assert ended.value.code == 0
    return folder


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A digit, in a file."""
    from PIL import Image

    from vitlab.data.registry import load_dataset

    path = tmp_path / "one.png"
    Image.fromarray(load_dataset("digits", "test", classes=(1,)).image(0)).save(path)
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window (a selenium driver), which resolves no names and keeps a log of every request; the test
    is skipped where it is not installed."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian's chromium and chromium-driver; `make browser`)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = ["headless=new", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "window-size=1280,1000"]
    flags += ["disable-background-networking", "disable-component-update"]
    flags.append("host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1")
    if getattr(os, "geteuid", lambda: 1)() == 0:
        flags.append("no-sandbox")  # its sandbox does not work as root
    for flag in flags:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    started = webdriver.Chrome(options, Service(driver))
    try:
        yield started
    finally:
        started.quit()
