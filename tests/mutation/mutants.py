"""Make mutants of a module: one small change each, such as `<=` in place of `<`.

A mutant is a replacement of part of the source text, so all other lines keep their numbers.
Text that cannot change a result is left alone: annotations, decorators, docstrings, assertions
(also `strict=` of `zip`), what is raised, logged, warned, printed or shown as progress, the
indentation of JSON, `__repr__`, `__str__`, casts and blocks for type checkers.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Pow: ast.Mult,
}  # fmt: skip

TEXTS = (
    "warn", "print", "debug", "info", "warning", "error", "exception", "on_progress", "show_work",
    "cast",
)  # fmt: skip
"""Functions whose arguments are texts for people, or types."""

Change = tuple[ast.expr | ast.stmt, str, ast.AST]


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a change is."""

    function: str = ""
    """The innermost function or class, such as `Engine.step`, or a module's constant."""
    lines: tuple[int, int] = (1, 10**9)
    """First and last line of that function or class; all lines outside of them."""
    statement: tuple[int, int] = (1, 10**9)
    """First and last line of the statement, without the body that it may have."""
    at_import: bool = True
    """Whether the line runs when the module is imported, not when a function is called."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    path: str
    """The module, relative to the repository."""
    first_line: int
    last_line: int
    kind: str
    before: str
    after: str
    start: int
    """Offset of the replaced text in the source, in bytes."""
    stop: int
    scope: Scope

    @property
    def name(self) -> str:
        """Where and what the change is, in one line."""
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        place = f"{self.path}:{self.first_line}"
        return f"{place} {self.kind}: {before[:70]} -> {after[:70]} @{self.start}"

    def apply(self, source: str) -> str:
        """Return the source with the change."""
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.stop :]).decode()


def make_mutants(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a module."""
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    found = []
    for (node, kind, changed), scope in _changes(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = offsets[node.lineno - 1] + node.col_offset
        stop = offsets[node.end_lineno - 1] + node.end_col_offset
        before = source.encode()[start:stop].decode()
        after = ast.unparse(changed)
        # In an expression, parentheses keep the order of evaluation.
        after = f"({after})" if isinstance(changed, ast.expr) else after
        found.append(
            Mutant(path, node.lineno, node.end_lineno, kind, before, after, start, stop, scope)
        )
    return found


def _changes(tree: ast.Module) -> Iterator[tuple[Change, Scope]]:
    for node, scope in _nodes(tree, Scope()):
        for change in _changes_of(node):
            yield change, scope


def _nodes(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.expr | ast.stmt, Scope]]:
    """Yield all expressions and statements in which a change can change a result."""
    if _is_text(node):
        return
    if isinstance(node, ast.stmt):
        scope = replace(scope, statement=_header(node))
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            scope = replace(scope, function=scope.function or name)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        name = f"{scope.function}.{node.name}".lstrip(".")
        assert node.end_lineno is not None
        scope = replace(scope, function=name, lines=(node.lineno, node.end_lineno))
    if isinstance(node, ast.expr | ast.stmt):
        yield node, scope
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        if isinstance(node, ast.Call) and name in ("args", "keywords") and _writes_text(node):
            continue
        called = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inner = replace(scope, at_import=False) if called and name == "body" else scope
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child, inner)


def _is_text(node: ast.AST) -> bool:
    """Whether a change in the node changes only what people or type checkers read."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.keyword(arg="strict" | "indent"):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
        case _:
            return False


def _writes_text(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func
    return (name.id if isinstance(name, ast.Name) else name) in TEXTS


def _header(node: ast.stmt) -> tuple[int, int]:
    body = getattr(node, "body", None)
    assert node.end_lineno is not None
    return node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno


def _changes_of(node: ast.expr | ast.stmt) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=[operator, *_]) if type(operator) in COMPARISONS:
            changed = copy.deepcopy(node)
            changed.ops[0] = COMPARISONS[type(operator)]()
            yield node, "comparison", changed
        case ast.BinOp(op=operator) if type(operator) in OPERATORS and not _is_union(node):
            changed_operation = copy.deepcopy(node)
            changed_operation.op = OPERATORS[type(operator)]()
            yield node, "operator", changed_operation
        case ast.BoolOp(op=operator):
            changed_bool = copy.deepcopy(node)
            changed_bool.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield node, "and, or", changed_bool
        case ast.UnaryOp(op=ast.Not()):
            yield node, "negation", node.operand
        case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
            yield node, "sign", node.operand
        case ast.Constant(value=bool(value)):
            yield node, "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield node, "constant", ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield node, "constant", ast.Constant(value * 2 if value else 1.0)
        case ast.Call(func=ast.Name(id="max" | "min") | ast.Attribute(attr="transpose")):
            pass  # the order of their arguments does not matter
        case ast.Call(args=[first, second, *_]) if not _same(first, second):
            if not _writes_text(node):
                changed_call = copy.deepcopy(node)
                changed_call.args[:2] = [changed_call.args[1], changed_call.args[0]]
                yield node, "swapped arguments", changed_call
        case ast.IfExp() | ast.If() if not _is_negated_elsewhere(node.test):
            yield node.test, "negation", ast.UnaryOp(ast.Not(), node.test)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield node, "dropped return", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, "dropped statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "dropped statement", ast.Pass()
        case _:
            pass


def _is_negated_elsewhere(test: ast.expr) -> bool:
    """Whether another change is the same as the negation of this test."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot()]):
            return True
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return True
        case _:
            return False


def _same(first: ast.expr, second: ast.expr) -> bool:
    starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
    return starred or ast.dump(first) == ast.dump(second)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_union(node: ast.BinOp) -> bool:
    """Whether it may be a union of types, such as the second argument of `isinstance`."""
    return isinstance(node.op, ast.BitOr) and all(
        isinstance(side, ast.Name | ast.Constant) for side in (node.left, node.right)
    )
