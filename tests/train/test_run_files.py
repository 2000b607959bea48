"""What a job leaves, and what is made again where it is missing or corrupt."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pretrained_run import config, pretrained, workdir

from vitlab.checksums import SUMS, find_corrupt_files
from vitlab.config import DataConfig, FinetuneConfig, OptimConfig
from vitlab.errors import UserError
from vitlab.finetuning import run_job
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.inspection import write_pages

__all__ = ["config", "pretrained", "workdir"]

pytestmark = pytest.mark.usefixtures("unchecked")
STALE = "0123456789abcdef"
NO_PAGE: dict[str, Any] = {"make_embedding_figures": [], "make_figures": [], "checkpoint_page": "page"}
NO_PAGE |= dict.fromkeys(("run_section", "data_section", "summarize"))


@pytest.fixture(scope="module")
def start(config: Any, workdir: Path, pretrained: Any) -> Callable[[Path], dict[str, Any]]:
    """Starts a job with all stages: a least-squares head, a sweep, two runs, and a report."""
    settings = FinetuneConfig(
        model=config.model,
        data=DataConfig(classes=(3, 4, 5), crop="none", flip=False, train_split="trainval", eval_split="test"),
        optim=OptimConfig(lr=1e-3),
        steps=2,
        batch_size=16,
        precision="float32",
        checkpoint_every=1,
        learning_rates=(1e-3, 1e-2),
        held_out=0.25,
        runs=2,
        head="least_squares",
    )
    return lambda folder: sweep_and_finetune(workdir, settings, folder, device="cpu", tensorboard=False).result


@pytest.fixture(scope="module", autouse=True)
def _small_job() -> Any:
    """No page, which takes seconds, and runs though two steps do not help."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_job, "_helps", lambda *_: True)
        for name, made in NO_PAGE.items():
            patch.setattr(write_pages, name, lambda *_, made=made, **__: made)
        yield


@pytest.fixture(scope="module")
def job(start: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job") / "job"
    start(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """All files that do not depend on how often the job was started: not measured times, and what has their checksum.
    The sweep deletes its checkpoints."""
    varying = ("speed.jsonl", SUMS, ".lock")
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in varying]
    read = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    read["report/result.json"] = re.sub(rb'"/.*/job', b'"job', read["report/result.json"])  # the same elsewhere
    return read


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)


def leave(path: Path) -> None:
    """What a killed process has left beside the corrupt file."""
    path.with_name(f".{path.name}.{STALE}.new").write_bytes(b"half")
    flip(path)


def test_all_that_a_job_leaves_has_a_checksum(job: Path) -> None:
    sums = {run: (job / run / SUMS).read_text() for run in (".", "linear", "run-0", "run-1", "sweep/lr-0.01")}
    for name in ("report/index.html", "report/result.json", "model/README.md", "run-1/SHA256SUMS", "linear/SHA256SUMS"):
        assert f"  {name}\n" in sums["."]
    assert all("  result.json\n" in text for text in sums.values())


EVERYWHERE = (
    *("report/index.html", "model/README.md", "model/model.safetensors"),
    *("run-0/model/model.safetensors", "linear/model/config.json", "sweep/lr-0.01/result.json"),
)


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (flip, ("report/result.json",)),
        (leave, ("model/model.safetensors",)),
        (Path.unlink, ("run-1/SHA256SUMS", *EVERYWHERE)),
    ],
)
def test_what_is_missing_or_corrupt_is_made_again(
    damage: Callable[[Path], None], names: tuple[str, ...], job: Path, start: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    shutil.copytree(job, folder)
    before = contents(job)
    for name in names:
        damage(folder / name)
    result = start(folder)
    assert contents(folder) == before
    assert result == json.loads(before["result.json"])
    assert all(find_corrupt_files(run) == {} for run in (folder, folder / "run-0", folder / "linear"))


def test_an_edited_card_stays_where_the_model_is_made_again(job: Path, start: Any, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(job, folder)
    card = folder / "model" / "README.md"
    card.write_text(text := card.read_text() + "\nOur own words.\n")
    flip(folder / "model" / "model.safetensors")
    start(folder)
    assert contents(folder) == contents(job) | {"model/README.md": text.encode()}
    assert find_corrupt_files(folder) == {}


def test_a_kill_during_the_report(job: Path, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card, which comes last, is written at the next start; an error is a note, and is tried again as well."""
    folder, written = tmp_path / "job", []
    shutil.copytree(job, folder)
    shutil.rmtree(folder / "report")
    (folder / "model" / "README.md").unlink()

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    def fail(*_: Any) -> None:
        raise UserError("no")

    for interrupt in (kill, fail):
        with monkeypatch.context() as patch:
            patch.setattr(write_pages, "_write_card", interrupt)
            try:
                start(folder)
            except KeyboardInterrupt:
                written.append("killed")
        assert (folder / "report" / "index.html").exists()
        assert not (folder / "model" / "README.md").exists()
    start(folder)
    assert (contents(folder), written) == (contents(job), ["killed"])
