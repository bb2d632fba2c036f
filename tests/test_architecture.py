"""The house keeps its plan: which room may import which, no cycles, no torch where none belongs, nothing too long.

Rules are checked on the source, so imports inside functions and under ``TYPE_CHECKING`` count too: a type that a room
may not know is as much a dependency as a call.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "overlap_callbacks"

# A room may import the rooms to its right, and those to the right of them. docs/architecture.md draws the same.
ARROWS = """\
cli, integrations -> monitor -> gate -> instruments -> analysis
                     monitor -> sinks -> analysis
cli -> experiments -> report -> traces -> analysis
       experiments -> instruments
"""
FOR_ALL = ("_log", "_threads", "_validation", "_version")  # these import nothing of ours, so every room may import them
PUBLIC = "public names"  # overlap_callbacks/__init__.py and __main__.py
# The public names lead anywhere, so an import of one of them hides an arrow. Only what stands where a user stands
# may use them.
USERS = ("cli", "integrations")
# Training jobs that come with the library: they add the one line as a user does.
JOBS = (f"{PACKAGE}.cli.demo", f"{PACKAGE}.experiments.study.job")
# The one file that knows the device. Benchmarks and the demo's jobs are programs for CUDA themselves.
DEVICE = f"{PACKAGE}.instruments.device"
FOR_CUDA = ("experiments", "cli")
WITHOUT_TORCH = ("analysis", "sinks", "traces", "report", *FOR_ALL)
# TensorBoard's writer is part of torch. Only a running job uses this sink, and only its methods import the writer.
TENSORBOARD = (f"{PACKAGE}.sinks.tensorboard", "torch.utils.tensorboard")
# Plain data is the ground: below it are only files of analysis that import nothing of ours.
GROUND = f"{PACKAGE}.analysis.results"
MAX_FILE_LINES = 500
MAX_CLASS_LINES = 300


class Import(NamedTuple):
    module: str
    line: int
    at_import: bool  # runs when the importing module is loaded


class House:
    """The modules of the library by name, and what each imports of ours and of torch."""

    def __init__(self, sources: Mapping[str, str], packages: frozenset[str] = frozenset()) -> None:
        self.trees = {name: ast.parse(source) for name, source in sources.items()}
        self.packages = packages
        self.num_lines = {name: len(source.splitlines()) for name, source in sources.items()}

    @functools.cached_property
    def imports(self) -> dict[str, list[Import]]:
        return {
            name: [*self._imports(name, tree, is_package=name in self.packages)] for name, tree in self.trees.items()
        }

    def _imports(self, name: str, tree: ast.Module, *, is_package: bool) -> Iterator[Import]:
        at_import = {id(node) for node in _run_at_import(tree)}
        for node in ast.walk(tree):
            for target in _targets(node, name, is_package=is_package):
                module = self._module_of(target)
                if module is not None:
                    yield Import(module, node.lineno, id(node) in at_import)  # type: ignore[attr-defined]

    def _module_of(self, target: str) -> str | None:
        """The module that a dotted path means: ``overlap_callbacks.sinks.Sink`` is ``overlap_callbacks.sinks``."""
        if target.partition(".")[0] == "torch":
            return target
        while target:
            if target in self.trees:
                return target
            target = target.rpartition(".")[0]
        return None

    def ours(self) -> Iterator[tuple[str, Import]]:
        """Every import from one of our modules of another."""
        for name, imports in self.imports.items():
            yield from ((name, found) for found in imports if found.module in self.trees)


def _targets(node: ast.AST, module: str, *, is_package: bool) -> list[str]:
    """The dotted paths that a statement, or a call of ``import_module`` with a literal, imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + is_package]
            base = ".".join([*parts, *base.split(".")] if base else parts)
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is loaded: all but the bodies of functions, and what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _run_at_import(child)


def reachable(drawing: str) -> dict[str, set[str]]:
    """The rooms that each room may import, from a drawing of arrows."""
    direct: dict[str, set[str]] = {}
    for line in drawing.splitlines():
        stages = [[room.strip() for room in stage.split(",")] for stage in line.split("->")]
        for froms, tos in zip(stages, [*stages[1:], []], strict=True):
            for room in froms:
                direct.setdefault(room, set()).update(tos)
    order = [*graphlib.TopologicalSorter(direct).static_order()]  # from the right; a drawing with a cycle raises
    closure: dict[str, set[str]] = {}
    for room in order:
        closure[room] = direct[room].union(*(closure[to] for to in direct[room]))
    return closure


MAY_IMPORT = reachable(ARROWS)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module and module != f"{PACKAGE}.__main__" else PUBLIC


def place(module: str, line: int | None = None) -> str:
    """``path:line`` of a module, as editors and terminals take it."""
    path = module.replace(".", "/")
    if path.startswith(f"{PACKAGE}/integrations"):
        path = path.removeprefix(f"{PACKAGE}/")
    path = f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"
    return path if line is None else f"{path}:{line}"


# -- the rules: each yields an offender a line


def wrong_arrows(house: House) -> Iterator[str]:
    for module, (imported, line, _) in house.ours():
        room, other = room_of(module), room_of(imported)
        at = f"{place(module, line)} imports {imported}"
        is_line = other == "integrations" and any([in_folder(module, job) for job in JOBS])
        if other == room or other in FOR_ALL or room == PUBLIC or is_line:
            continue
        if room in FOR_ALL:
            yield f"{at}: {room}.py must import nothing of ours, since every room imports it"
        elif other == PUBLIC:
            if room not in USERS:
                yield f"{at}: a room names the module that it means; public names are for {' and '.join(USERS)}"
        elif other not in MAY_IMPORT.get(room, ()):
            yield f"{at}: {room} may import {', '.join(sorted(MAY_IMPORT.get(room, ()))) or 'no other room'}"


def shaky_ground(house: House) -> Iterator[str]:
    leaves = {name for name in house.trees} - {name for name, _ in house.ours()}
    for module, (imported, line, _) in house.ours():
        if in_folder(module, GROUND) and not in_folder(imported, GROUND) and imported not in leaves:
            yield f"{place(module, line)} imports {imported}, which itself imports modules of ours"


def sibling_cycle(house: House) -> list[str]:
    """Folders of one room that import each other in a circle, if there are any."""
    folders: dict[str, set[str]] = {}
    for module, (imported, _, _) in house.ours():
        if room_of(module) == room_of(imported) and min(module.count("."), imported.count(".")) >= 3:
            one, other = (".".join(name.split(".")[:3]) for name in (module, imported))
            if one != other:
                folders.setdefault(one, set()).add(other)
    return cycle(folders)


def file_cycle(house: House) -> list[str]:
    imports = {
        name: {i.module for i in found if i.at_import and i.module in house.trees and i.module != name}
        for name, found in house.imports.items()
    }
    return cycle(imports)


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [*reversed(error.args[1])]
    return []


def torch_imports(house: House) -> Iterator[str]:
    for module, imports in house.imports.items():
        for imported, line, at_import in imports:
            is_writer = module == TENSORBOARD[0] and in_folder(imported, TENSORBOARD[1]) and not at_import
            if room_of(module) in WITHOUT_TORCH and imported not in house.trees and not is_writer:
                yield f"{place(module, line)} imports {imported}"


def knows_cuda(house: House) -> Iterator[str]:
    for module, tree in house.trees.items():
        if module == DEVICE or room_of(module) in FOR_CUDA:
            continue
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        lines = [node.lineno for node in named if ast.unparse(node) == "torch.cuda"]
        lines += [line for imported, line, _ in house.imports[module] if in_folder(imported, "torch.cuda")]
        yield from (f"{place(module, line)} names torch.cuda" for line in lines)


def too_long(house: House) -> Iterator[str]:
    for module, tree in house.trees.items():
        if house.num_lines[module] > MAX_FILE_LINES:
            yield f"{place(module)} has {house.num_lines[module]} lines, {MAX_FILE_LINES} are allowed"
        for node in ast.walk(tree):
            num_lines = (node.end_lineno or 0) - node.lineno + 1 if isinstance(node, ast.ClassDef) else 0
            if num_lines > MAX_CLASS_LINES:
                name = node.name  # type: ignore[attr-defined]
                yield f"{place(module, node.lineno)} class {name} has {num_lines} lines, {MAX_CLASS_LINES} are allowed"


def in_folder(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def listed(offenders: Iterator[str]) -> str:
    return "\n".join(offenders)


# -- the house as it stands


@pytest.fixture(scope="module")
def house() -> House:
    sources: dict[str, str] = {}
    packages: set[str] = set()
    for folder, prefix in ((ROOT / PACKAGE, PACKAGE), (ROOT / "integrations", f"{PACKAGE}.integrations")):
        for file in sorted(folder.rglob("*.py")):
            parts = [prefix, *file.relative_to(folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
                packages.add(".".join(parts))
            sources[".".join(parts)] = file.read_text()
    return House(sources, frozenset(packages))


def test_every_room_is_drawn_and_every_drawn_room_exists(house: House) -> None:
    rooms = {room_of(module) for module in house.trees} - {PUBLIC, *FOR_ALL}
    assert rooms == set(MAY_IMPORT), "draw the new room in ARROWS, and in docs/architecture.md"


def test_the_docs_draw_the_arrows_that_are_held() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert f"```\n{ARROWS}```" in text, "docs/architecture.md must show ARROWS of this file word for word"


def test_imports_follow_the_arrows(house: House) -> None:
    found = listed(wrong_arrows(house))
    assert not found, (
        f"these imports run against the arrows:\n{found}\n{ARROWS}"
        "Move what is shared to the room that both may import, or hand it in as an argument."
    )


def test_plain_data_imports_nothing_from_the_package(house: House) -> None:
    found = listed(shaky_ground(house))
    assert not found, (
        f"analysis/results/ may import itself, and files of analysis/ that import nothing of ours:\n{found}\n"
        "Compute in analysis/, and keep the result's fields in analysis/results/."
    )


def test_folders_within_a_room_do_not_import_each_other_in_a_circle(house: House) -> None:
    found = sibling_cycle(house)
    assert not found, f"{' -> '.join(found)}\nMove what both need to the room's own level, or below."


def test_files_do_not_import_each_other_in_a_circle(house: House) -> None:
    found = file_cycle(house)
    assert not found, f"{' -> '.join(found)}\nMove what both need to a file that imports neither."


def test_rooms_without_torch_do_not_name_it(house: House) -> None:
    found = listed(torch_imports(house))
    assert not found, (
        f"{', '.join(WITHOUT_TORCH)} must work without torch, within functions too:\n{found}\n"
        "Read what needs torch in instruments/, gate/ or monitor/, and pass plain data on."
    )


def test_rooms_without_torch_do_not_load_it(house: House) -> None:
    modules = [module for module in house.trees if room_of(module) in WITHOUT_TORCH]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} loads torch: find the import with python -X importtime -c \"import {name}\"')\n"
        "print(len(sys.argv) - 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(modules) > 0


def test_one_file_knows_the_device(house: House) -> None:
    found = listed(knows_cuda(house))
    assert not found, f"{found}\nAsk instruments/device.py, which serves accelerators of every vendor."


def test_every_folder_with_code_is_a_package_that_is_installed(house: House) -> None:
    packaged = set(re.findall(rf'^    "({PACKAGE}[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    folders = {module.rpartition(".")[0] for module in house.trees} - {""} | {PACKAGE}
    assert folders <= house.packages, "give the folder an __init__.py, and look that git does not ignore it"
    assert packaged == house.packages, "list the folder under packages in pyproject.toml"


def test_files_and_classes_are_short(house: House) -> None:
    found = listed(too_long(house))
    assert not found, f"{found}\nSplit by what the parts are for; a file is one idea."


def test_files_outside_the_package_are_short() -> None:
    files = [file for folder in ("tests", "benchmarks", "docs", "examples") for file in (ROOT / folder).rglob("*.py")]
    # A class of too many lines is in a file of more; only such files are parsed.
    sources = {str(file.relative_to(ROOT).with_suffix("")).replace("/", "."): file.read_text() for file in files}
    house = House({name: text for name, text in sources.items() if len(text.splitlines()) > MAX_CLASS_LINES})
    found = listed(too_long(house))
    assert files
    assert not found, f"{found}\nJobs that run in the ranks, cases and helpers can stand in a file beside the tests."


# -- the rules themselves: each finds what it forbids


@pytest.mark.parametrize(
    ("module", "source", "offender"),
    [
        ("sinks.jsonl", "import overlap_callbacks.report.record", "sinks may import analysis"),
        ("sinks.jsonl", "def f():\n    from overlap_callbacks.report import record", "sinks may import analysis"),
        ("sinks.jsonl", "if TYPE_CHECKING:\n    from overlap_callbacks.report.record import R", "sinks may import"),
        ("sinks.jsonl", "importlib.import_module('overlap_callbacks.report.record')", "sinks may import analysis"),
        ("gate.gate", "from ..monitor import window", "gate may import analysis, instruments"),
        ("monitor.window", "from overlap_callbacks.integrations.pytorch import attach", "monitor may import"),
        ("cli.show", "from overlap_callbacks.integrations.pytorch import attach", "cli may import"),
        ("experiments.study.one_job", "import overlap_callbacks.integrations.pytorch", "experiments may import"),
        ("analysis.statistics", "from overlap_callbacks import OverlapReport", "names the module that it means"),
        ("_threads", "from overlap_callbacks.analysis import statistics", "must import nothing of ours"),
    ],
)
def test_an_arrow_that_runs_back_is_found(module: str, source: str, offender: str) -> None:
    sources = dict.fromkeys(
        (PACKAGE, *(f"{PACKAGE}.{name}" for name in (
            "report", "report.record", "monitor", "monitor.window", "analysis", "analysis.statistics", "gate.gate",
            "integrations.pytorch", "sinks.jsonl", "cli.show", "_threads",
        ))), "",
    )  # fmt: skip
    assert not listed(wrong_arrows(House(sources)))
    found = listed(wrong_arrows(House({**sources, f"{PACKAGE}.{module}": source})))
    assert offender in found
    assert ":1 imports" in found or ":2 imports" in found


def test_what_the_arrows_allow_is_not_found() -> None:
    sources = {
        f"{PACKAGE}": f"def __getattr__(name):\n    from {PACKAGE}.monitor import window",
        f"{PACKAGE}.analysis": "",
        f"{PACKAGE}._validation": "",
        f"{PACKAGE}.monitor.window": f"from {PACKAGE}.analysis import statistics\nfrom {PACKAGE} import _validation",
        f"{PACKAGE}.integrations.pytorch": f"from {PACKAGE} import OverlapMonitor",
        f"{PACKAGE}.cli.demo.worker": f"def f():\n    import {PACKAGE}.integrations.pytorch",
        f"{PACKAGE}.experiments.study.job.worker": f"def f():\n    import {PACKAGE}.integrations.pytorch",
    }
    house = House(sources)
    assert not listed(wrong_arrows(house))
    assert sum(1 for _ in house.ours()) == 6


def test_ground_that_rests_on_something_is_found() -> None:
    sources = {
        f"{GROUND}.run": f"from {PACKAGE}.analysis import name_rules",
        f"{PACKAGE}.analysis.name_rules": "import re",
        f"{PACKAGE}.analysis.statistics": "",
    }
    assert not listed(shaky_ground(House(sources)))
    sources[f"{PACKAGE}.analysis.name_rules"] = f"from {PACKAGE}.analysis import statistics"
    assert "results/run.py:1 imports" in listed(shaky_ground(House(sources)))


def test_a_cycle_is_found() -> None:
    a, b = f"{PACKAGE}.gate.a", f"{PACKAGE}.gate.b"
    late = f"def f():\n    import {a}"
    assert file_cycle(House({a: f"import {b}", b: late})) == []
    assert file_cycle(House({a: f"import {b}", b: f"try:\n    import {a}\nexcept ImportError:\n    pass"})) in (
        [a, b, a],
        [b, a, b],
    )
    kernels, power = f"{PACKAGE}.analysis.kernels", f"{PACKAGE}.analysis.power"
    house = House({f"{kernels}.t": f"import {power}.job", f"{power}.job": "", f"{power}.trace": f"import {kernels}.t"})
    assert {*sibling_cycle(house)} == {kernels, power}
    with pytest.raises(graphlib.CycleError):
        reachable("a -> b\nb -> a")


def test_cuda_is_found() -> None:
    name = f"{PACKAGE}.gate.gate"
    for source in ("x: torch.cuda.Stream", "torch.cuda.synchronize()", "import torch.cuda", "from torch import cuda"):
        assert listed(knows_cuda(House({name: source}))).endswith("gate.py:1 names torch.cuda")
    for source in ("x: torch.Stream", "import torch", "torch.backends.cuda", "# torch.cuda"):
        assert listed(knows_cuda(House({name: source}))) == ""


def test_torch_and_length_are_found() -> None:
    name = f"{PACKAGE}.report.record"
    assert "imports torch.distributed" in listed(
        torch_imports(House({name: "def f():\n    from torch import distributed"}))
    )
    assert listed(torch_imports(House({f"{PACKAGE}.gate.gate": "import torch"}))) == ""
    long_class = "class A:\n" + "    x = 1\n" * 300
    assert "class A has 301 lines" in listed(too_long(House({name: long_class})))
    assert "has 501 lines" in listed(too_long(House({name: "x = 1\n" * 501})))
    assert listed(too_long(House({name: "class A:\n" + "    x = 1\n" * 299 + "x = 1\n" * 200}))) == ""
