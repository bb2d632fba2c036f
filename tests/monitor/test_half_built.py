"""``gc.get_objects()`` of the user shows what our threads are still building, and must not break it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import overlap_callbacks

ROOT = Path(overlap_callbacks.__file__).parent
OFFLINE = ("cli", "report", "traces")  # these do not run within a job
SOURCES = [
    path
    for folder in (ROOT, ROOT.parent / "integrations")
    for path in sorted(folder.rglob("*.py"))
    if not set(path.relative_to(folder).parts) & set(OFFLINE)
]


def half_built_tuples(tree: ast.AST) -> list[int]:
    """Lines on which Python code runs while a tuple is being filled.

    CPython fills the tuple itself and then resizes it. If another thread has got hold of it meanwhile, the resize
    raises SystemError. A tuple made of a list is made at once.
    """
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            is_tuple = isinstance(node.func, ast.Name) and node.func.id == "tuple"
            # Beside other arguments, what is starred goes through a list.
            alone = len(node.args) == 1
            starred = [argument.value for argument in node.args if alone and isinstance(argument, ast.Starred)]
            filled = [*node.args, *starred] if is_tuple else starred
            lines += [node.lineno for argument in filled if is_lazy(argument)]
    return lines


def is_lazy(argument: ast.expr) -> bool:
    is_map = isinstance(argument, ast.Call) and isinstance(argument.func, ast.Name) and argument.func.id == "map"
    return isinstance(argument, ast.GeneratorExp) or is_map


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("tuple(x for x in y)", [1]),
        ("tuple(map(f, y))", [1]),
        ("f(*(x for x in y))", [1]),
        ("tuple([x for x in y]), f(*[x for x in y]), f(x, *(x for x in y)), (*(x for x in y),)", []),
    ],
)
def test_a_tuple_that_is_filled_by_python_code_is_found(source: str, found: list[int]) -> None:
    assert half_built_tuples(ast.parse(source)) == found


def test_no_tuple_is_filled_by_python_code() -> None:
    found = [f"{path}:{line}" for path in SOURCES for line in half_built_tuples(ast.parse(path.read_text()))]
    assert len(SOURCES) > 100
    assert not found, "make a list first, and the tuple of that"
