"""`# -> value`: what a line of an example shows, compared with what it gives.

    1 + 1  # -> 2
    print("a", "b")  # -> a b
    receipt = await mq.send("orders", b"…")  # -> Receipt(topic='orders', ...)

Behind a call of `print` stands what is printed; behind another expression, or an assignment to one name, its
`repr`. `...` stands for anything. Must never let a comment pass that was not compared: one that stands
behind something else, or on a line that was never reached, is an error.
"""

from __future__ import annotations

import ast
import doctest
import io
import tokenize
from collections.abc import Iterator
from types import CodeType
from typing import Any

__all__ = ["Shown"]

_CHECK = "__shown__"
_CHECKER = doctest.OutputChecker()


class Shown:
    """The comparisons of one page."""

    def __init__(self) -> None:
        self.open: dict[tuple[str, int], str] = {}  # written, and not reached yet

    def compile(self, text: str, name: str, line: int) -> CodeType:
        """Code of a block that starts at that line; it may `await` at its top level."""
        wanted = {line - 1 + at: value for at, value in _comments(text)}
        tree = ast.parse("\n" * (line - 1) + text, name)
        rewriter = _Rewriter(name, dict(wanted))
        tree = ast.fix_missing_locations(rewriter.visit(tree))
        assert not rewriter.left, f"{name}: nothing to compare on lines {sorted(rewriter.left)}"
        self.open.update({(name, at): value for at, value in wanted.items()})
        code: CodeType = compile(tree, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return code

    def names(self) -> dict[str, Any]:
        """What the compiled code calls."""
        return {_CHECK: self._check}

    def _check(self, name: str, line: int, want: str, printed: bool, *values: object) -> None:
        got = " ".join(map(str, values)) if printed else repr(values[0])
        self.open.pop((name, line), None)
        if not _CHECKER.check_output(f"{want}\n", f"{got}\n", doctest.ELLIPSIS):
            raise AssertionError(f"{name}:{line} shows {want!r}, but it is {got!r}")

    def assert_all_reached(self) -> None:
        assert not self.open, f"never reached: {', '.join(f'{n}:{at}' for n, at in self.open)}"


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.string.startswith("# -> "):
            yield token.start[0], token.string.removeprefix("# -> ").strip()


class _Rewriter(ast.NodeTransformer):
    """Puts a comparison behind each statement that shows its value."""

    def __init__(self, name: str, wanted: dict[int, str]) -> None:
        self._name = name
        self.left = wanted

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        want = self.left.pop(node.end_lineno or 0, None)
        if want is None:
            return self.generic_visit(node)
        match node.value:
            case ast.Call(func=ast.Name(id="print"), args=args, keywords=[]):
                return [node, self._call(node, want, True, *args)]
        return self._call(node, want, False, node.value)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        match node.targets:
            case [ast.Name(id=target)] if node.end_lineno in self.left:
                want = self.left.pop(node.end_lineno)
                return [node, self._call(node, want, False, ast.Name(target, ast.Load()))]
        return self.generic_visit(node)

    def _call(self, node: ast.stmt, want: str, printed: bool, *values: ast.expr) -> ast.Expr:
        facts = [ast.Constant(value) for value in (self._name, node.end_lineno, want, printed)]
        call = ast.Call(ast.Name(_CHECK, ast.Load()), [*facts, *values], [])
        return ast.copy_location(ast.Expr(call), node)
