"""The rules of CONTRIBUTING.md that a test can check."""

import ast
import functools
import graphlib
import importlib
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from breaks import BREAKS, applies
from program import SMALL

import vitlab

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "vitlab"
SOURCES = sorted(SRC.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))

BASE = (
    *("errors", "ranks", "settings", "rng", "io", "checksums", "display"),
    *("panels", "preprocessing", "config"),
)
RECIPES = ("errors", "settings", "preprocessing", "config", "models.config", "models.registry", "models.resnet_config")
RECIPES += ("models.image_size", "models.readout", "models.variant")
CORE = (*BASE, "models", "data", "weights", "train", "recipes", "evaluation")
STANDS_ON = {
    "errors": (),
    "ranks": ("errors",),
    "settings": ("errors",),
    "panels": (),
    "rng": (),
    "io": ("errors",),
    "checksums": ("io",),
    "display": ("errors",),
    "config": ("errors", "settings", "preprocessing", "models.config"),
    "preprocessing": ("errors", "settings"),
    "models": ("errors", "settings", "preprocessing"),
    "data": BASE,
    "weights": (*BASE, "models", "data.transforms"),
    "train": (*BASE, "models", "data"),
    "recipes": RECIPES,
    "evaluation": (*BASE, "models", "data", "weights", "train"),
    "runs": CORE,
    "inspection": (*CORE, "runs"),
    "finetuning": (*CORE, "runs", "inspection"),
    "studies": (*CORE, "runs", "inspection", "finetuning"),
    "cost": (*CORE, "runs", "inspection", "finetuning", "studies"),
    "app": (*CORE, "inspection"),
    "paper": (*CORE, "runs", "inspection", "finetuning", "studies", "cost"),
    "commands": ("",),
    "api": ("",),
    "sklearn": ("",),
    "cli": ("",),
    "__main__": ("cli",),
}
"""What each folder may import of the project: folders below it ("" is all of them)."""
WINGS = ("inspection", "finetuning", "studies", "cost", "app", "paper")
"""Folders that nothing below them needs, in their order."""
TEN_FILES = (
    *("models/vit.py", "models/encoder.py", "models/attention.py", "models/position.py", "recipes/pretrain.py"),
    *("recipes/finetune.py", "train/step.py", "train/loop.py", "train/masking.py", "evaluation/fewshot.py"),
    "inspection/attention.py",
)
"""The paper's ideas in reading order; step and loop count as one."""

CORE_MODULES = [
    ".".join(path.relative_to(SRC.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCES
    if path.relative_to(SRC).with_suffix("").parts[0] not in (*WINGS, "commands", "api", "sklearn", "cli", "__main__")
]

HOMES = {
    "torch.distributed": ("train/distributed.py", "train/parallel.py"),
    "matplotlib": ("inspection/figures.py", "inspection/overview.py", "inspection/plots.py"),
}
"""Libraries that only these files may import."""

TORCH_FREE = (
    "vitlab",
    *("vitlab.models", "vitlab.models.registry", "vitlab.preprocessing", "vitlab.weights", "vitlab.config"),
    *("vitlab.recipes", "vitlab.commands", "vitlab.cli"),
)
UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
PICKLES = Path("weights", "pickled.py")
"""The only file that reads pickles, and only their tensors."""


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@functools.cache
def walk(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def imports(tree: ast.Module, package: str = "vitlab") -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, lazily or not; `package` is where dots start."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("vitlab", "torch"):
            yield node.lineno, ast.unparse(node)  # `import vitlab`, then `vitlab.load_model`
        elif isinstance(node, ast.Call) and "import_module" in (getattr(node.func, at, "") for at in ("attr", "id")):
            yield from ((node.lineno, str(arg.value)) for arg in node.args if isinstance(arg, ast.Constant))


def lies_in(name: str, module: str) -> bool:
    return module == "" or f"{name}.".startswith(f"{module}.")


def wrong_imports(path: str, tree: ast.Module) -> list[str]:
    """The imports in `tree`, the text of src/vitlab/`path`, that do not go down."""
    room, *_ = parts = Path(path).with_suffix("").parts
    wrong = []
    for line, name in imports(tree, ".".join(("vitlab", *parts[:-1]))):
        root, *below = name.split(".")
        if root != "vitlab" or not below or below[0] == room or below[0].startswith("__"):
            continue
        home = vitlab.MODULE_OF.get(below[0])  # a public name stands for the room that it comes from
        target = f"{home}.{below[0]}".removeprefix("vitlab.") if home else ".".join(below)
        if not any(lies_in(target, allowed) for allowed in STANDS_ON[room]):
            wrong.append(f"{path}:{line} imports {name}; {room} stands on {STANDS_ON[room]} only")
    return wrong


def test_imports_go_down() -> None:
    files = [path for path in SOURCES if path != SRC / "__init__.py"]
    wrong = [wrong_imports(path.relative_to(SRC).as_posix(), parse(path)) for path in files]
    assert list(itertools.chain.from_iterable(wrong)) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/vit.py", "from vitlab.data.loader import Batch"),
        ("models/vit.py", "def f():\n    from ..train import loop"),
        ("train/loop.py", "import vitlab\nvitlab.load_model('x')"),
        ("train/loop.py", "from vitlab import load_model"),
        ("inspection/report.py", "import importlib\nimportlib.import_module('vitlab.studies.report')"),
    ],
)
def test_an_import_that_goes_up_is_seen(path: str, source: str) -> None:
    assert len(wrong_imports(path, ast.parse(source))) == 1


def import_graph() -> dict[str, set[str]]:
    """Module of src/vitlab -> the modules that its text imports, also in functions and for types alone."""
    modules = {".".join(path.relative_to(SRC.parent).with_suffix("").parts): path for path in SOURCES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {}
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        used = {name for _, name in imports(parse(path), package)}
        paths = [itertools.accumulate(name.split("."), "{}.{}".format) for name in used]  # `a`, `a.b`, `a.b.c`
        graph[module] = {[module, *(home for home in path if home in modules)][-1] for path in paths} - {module}
    return graph


def test_no_module_imports_itself_through_others() -> None:
    graphlib.TopologicalSorter(import_graph()).prepare()  # raises CycleError


@pytest.mark.usefixtures("unchecked")  # classes that are imported again are others
def test_the_core_works_without_the_wings(
    tmp_path: Path, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]
) -> None:
    """It imports none of them, and trains, tests and reads a model; which wing imports which, `STANDS_ON` says."""
    run = str(tmp_path / "run")

    def job() -> list[Any]:
        for name in [name for name in sys.modules if lies_in(name, "vitlab")]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys((f"vitlab.{wing}" for wing in WINGS), None))  # pyright: ignore
        for name in CORE_MODULES:
            importlib.import_module(name)
        main, codes = importlib.import_module("vitlab.cli").main, []
        for words in (["pretrain", "tiny-digits", "--steps", "2", "--workdir", run, *SMALL], ["evaluate", run]):
            with pytest.raises(SystemExit) as ended:
                main(words)
            codes.append(ended.value.code)
        return codes

    assert in_ranks(1, job) == [[0, 0]]


@pytest.mark.parametrize("name", TEN_FILES)
def test_the_files_that_the_readme_names(name: str) -> None:
    """Short, in the README in this order, without a wing; each opens with the part of the paper that it implements."""
    text = (SRC / name).read_text()
    assert text.count("\n") <= 300
    docstring = ast.get_docstring(parse(SRC / name)) or ""
    assert re.search(r"\b(Eq|Sec|App|Table|Fig)\. ?[0-9A-Z]", docstring)
    used = {below[1] for _, full in imports(ast.parse(text)) if (below := full.split("."))[0] == "vitlab"}
    assert not used & {*WINGS} - {"inspection"}
    readme = (ROOT / "README.md").read_text()
    places = [readme.index(f"`{file}`") for file in TEN_FILES]
    assert places == sorted(places)


def test_there_is_one_training_loop() -> None:
    loops = [
        path.relative_to(SRC).as_posix()
        for path in SOURCES
        for node in walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    ]
    assert loops == ["train/step.py"]


def test_every_deliberate_break_has_its_place() -> None:
    assert [row.what for row in BREAKS if not applies(row)] == []


def test_libraries_with_a_home_are_used_there_only() -> None:
    for path in SOURCES:
        strangers = {library for library, homes in HOMES.items() if path not in [SRC / home for home in homes]}
        used = [(line, name) for line, name in imports(parse(path)) for each in strangers if lies_in(name, each)]
        assert used == [], path


def test_every_source_file_has_its_test_file() -> None:
    for path in SOURCES:
        mirror = ROOT / "tests" / path.relative_to(SRC).with_name(f"test_{path.stem.strip('_')}.py")
        together = mirror.with_name(f"test_{path.parent.name}.py")  # such as all studies
        assert path.name == "__init__.py" or mirror.is_file() or together.is_file(), f"write {mirror}"


def test_house_rules() -> None:
    for path in (*SOURCES, *TESTS, *BENCHMARKS):
        assert path.stem not in {"utils", "util", "common", "helpers", "misc"}, "name it after what is in it"
        suspect = re.search(r"\bexcept:|Exception\b|__future__", path.read_text())
        for node in walk(parse(path)) if suspect else ():
            if isinstance(node, ast.ExceptHandler):
                caught = {ast.unparse(part) for part in ast.walk(node.type)} if node.type else {"Exception"}
                assert not caught & {"Exception", "BaseException"}, f"{path}:{node.lineno}: name the expected errors"
            if isinstance(node, ast.ImportFrom):
                assert node.module != "__future__", f"{path}: annotations are real objects here, for jaxtyping to check"


def test_pickles_have_one_door() -> None:
    for path in SOURCES:
        used = {name for _, name in imports(parse(path))}
        assert not {name.split(".")[0] for name in used} & UNPICKLERS, path
        assert "torch.save" not in used, f"{path}: weights and state are safetensors"
        calls = [node for node in walk(parse(path)) if isinstance(node, ast.Call)]
        loads = [ast.unparse(call) for call in calls if ast.unparse(call.func) == "torch.load"]
        door = ["torch.load(file, map_location='cpu', weights_only=True)"]
        assert loads == (door if path == SRC / PICKLES else []), path
        assert ("torch.load" in used) == bool(loads), f"{path}: torch.load is called, not passed on"
        if any(lies_in(name, "vitlab.weights.pickled") for name in used):
            assert path == SRC / "weights" / "conversion.py", "only convert opens pickles"
        keywords = [keyword for call in calls for keyword in call.keywords if keyword.arg == "allow_pickle"]
        assert {ast.unparse(keyword.value) for keyword in keywords} <= {"False"}, path


def test_names_and_settings_are_there_without_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_every_public_name_is_there() -> None:
    for name in (*vitlab.MODULE_OF, *vitlab.SUBPACKAGES):
        assert getattr(vitlab, name).__doc__
        assert name in dir(vitlab)
    with pytest.raises(AttributeError, match="create_model"):
        _ = vitlab.build_model  # pyright: ignore[reportAttributeAccessIssue]


def test_nothing_names_a_package_server_or_a_folder_of_one_machine() -> None:
    servers = "|".join(("py" + "pi", "python" + "hosted", "npm" + "js", "deb[.]" + "debian"))
    forbidden = re.compile(rf"({servers})[.](org|com)|(?<![\w.~-])/(work|farm|root|home|tmp)/")
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a worktree
    for folder in ("src", "tests", "benchmarks", "docs", ".ci"):
        files += [path for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts and path.is_file()]
    matches = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert matches == []
