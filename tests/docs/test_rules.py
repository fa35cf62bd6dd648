"""What CONTRIBUTING.md calls rules of the house and a program can check: errors in three parts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import headrace

ROOT = Path(__file__).resolve().parents[2]
ERRORS = {name for name in headrace.__all__ if name.endswith("Error")}


def raised() -> Iterator[tuple[str, ast.Call]]:
    """Every error of Headrace that the package makes, and where; classes with a text of their own are left out."""
    for path in sorted((ROOT / "src" / "headrace").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def may_be_empty(part: ast.expr) -> bool:
    """An empty text, also as the last resort of `x or ""` or as one of two cases."""
    if isinstance(part, ast.BoolOp):
        return may_be_empty(part.values[-1])
    if isinstance(part, ast.IfExp):
        return may_be_empty(part.body) or may_be_empty(part.orelse)
    return isinstance(part, ast.Constant) and not part.value


def test_every_error_has_three_parts() -> None:
    """What happened, facts, what to do: no part is left out or an empty text."""
    found = list(raised())
    assert len(found) > 150, "the search finds them"
    assert [where for where, call in found if len(call.args) != 3] == []
    empty = [where for where, call in found if any(map(may_be_empty, call.args))]
    assert empty == []


def test_parts_are_joined_as_sentences() -> None:
    """One full stop after each part, and none after a question or an ellipsis."""
    assert str(headrace.HeadraceError("it fell", "3 of 4.", "Try again!")) == "it fell. 3 of 4. Try again!"
    assert str(headrace.HeadraceError("did you mean 'lr'?", "there are a, b, ...", " ")) == (
        "did you mean 'lr'? there are a, b, ..."
    )
