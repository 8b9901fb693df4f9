"""The texts of the errors that the package raises, as its code has them: ``…`` stands for a value.

A text may stand in the call that makes the error, in a constant, in a local variable, in a function that returns it,
or be an argument of the function that makes the error. Where it is none of these, the error passes on what another
error, rank or library says.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

VALUE = "…"
KINDS_OF_ERRORS = [
    "ShardingError", "BatchingError", "RankDisagreement", "CoordinationTimeout", "RankLost", "SourceError",
    "StateMismatch", "InputError", "OutOfRangeError", "ValueError", "TypeError", "RuntimeError", "IndexError",
    "ImportError",
]  # fmt: skip
_MOST_TEXTS = 24  # of one expression; more would be the values of a table
_DEEPEST = 6


@dataclass(frozen=True)
class ErrorSite:
    """A place where the package makes an error.

    Args:
      kind: the name of the class.
      module: the dotted name of the module.
      line: its line there.
      texts: what the error may say; empty if it passes on another's words.
    """

    kind: str
    module: str
    line: int
    texts: tuple[str, ...]


def error_sites(root: Path) -> list[ErrorSite]:
    """Every place of the package that makes an error of a known kind."""
    return list(_Package(root).sites())


def says_something(text: str) -> bool:
    """Whether a text has words of its own."""
    return len(text.replace(VALUE, " ").split()) > 3


@dataclass(frozen=True, eq=False)
class _Scope:
    """Where names are looked up: a function, or a module, and what is known of the arguments."""

    module: _Module
    function: ast.FunctionDef | None
    arguments: dict[str, list[str]] = field(default_factory=dict)


class _Module:
    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.tree = ast.parse(text)
        self.inside: dict[ast.AST, ast.FunctionDef | None] = {}
        self._place(self.tree, None)

    def _place(self, node: ast.AST, function: ast.FunctionDef | None) -> None:
        self.inside[node] = function
        for child in ast.iter_child_nodes(node):
            self._place(child, node if isinstance(node, ast.FunctionDef) else function)

    @cached_property
    def assigned(self) -> dict[tuple[ast.FunctionDef | None, str], list[ast.expr]]:
        """What is assigned to each name, by the function in which it stands."""
        found: dict[tuple[ast.FunctionDef | None, str], list[ast.expr]] = {}
        for node, function in self.inside.items():
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                    | ast.NamedExpr(target=ast.Name(id=name), value=value)
                ):
                    found.setdefault((function, name), []).append(value)
                case _:
                    pass
        return found

    @cached_property
    def imported(self) -> set[str]:
        return {
            alias.asname or alias.name
            for node in self.inside
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchdistinput")
            for alias in node.names
        }


class _Package:
    """All modules, with their functions and constants by name."""

    def __init__(self, root: Path) -> None:
        self._modules = [
            _Module(path.relative_to(root).with_suffix("").as_posix().replace("/", "."), path.read_text())
            for path in sorted((root / "torchdistinput").rglob("*.py"))
        ]
        self._functions: dict[str, list[tuple[_Module, ast.FunctionDef]]] = {}
        self._calls: dict[str, list[tuple[_Module, ast.Call]]] = {}
        self._constants: dict[str, list[tuple[_Module, ast.expr]]] = {}
        for module in self._modules:
            for node in module.inside:
                if isinstance(node, ast.FunctionDef):
                    self._functions.setdefault(node.name, []).append((module, node))
                elif isinstance(node, ast.Call) and (name := _name_of(node.func)):
                    self._calls.setdefault(name, []).append((module, node))
            for (function, name), values in module.assigned.items():
                if function is None:
                    self._constants.setdefault(name, []).extend((module, value) for value in values)

    def sites(self) -> Iterator[ErrorSite]:
        for module in self._modules:
            for node in module.inside:
                if isinstance(node, ast.Call) and (kind := _name_of(node.func)) in KINDS_OF_ERRORS and node.args:
                    texts = self._texts_of_site(node.args[0], module, module.inside[node])
                    yield ErrorSite(kind, module.name.removesuffix(".__init__"), node.lineno, tuple(sorted(texts)))

    def _texts_of_site(self, text: ast.expr, module: _Module, function: ast.FunctionDef | None) -> list[str]:
        """What an error may say. An argument of its function stands in it where it is a sentence, or all there is."""
        own = _with_words(self._texts(text, _Scope(module, function)))
        if function is None:
            return own
        found = list(own)
        for caller, call in self._calls.get(function.name, []):
            arguments = self._arguments(function, call, _Scope(caller, caller.inside[call]))
            if own and not any(map(_with_words, arguments.values())):
                continue
            found += _with_words(self._texts(text, _Scope(module, function, arguments)))
        return _told_once(_each(found))

    def _arguments(
        self, function: ast.FunctionDef, call: ast.Call, scope: _Scope, depth: int = 0
    ) -> dict[str, list[str]]:
        """The texts that a call gives for the arguments of a function."""
        names = [each.arg for each in [*function.args.posonlyargs, *function.args.args]]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        given = dict(zip(names, call.args, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}
        return {name: self._texts(value, scope, depth + 1) for name, value in given.items()}

    def _texts(self, node: ast.expr, scope: _Scope, depth: int = 0) -> list[str]:
        """What an expression may be, as text."""
        found = self._all_texts(node, scope, depth) if depth < _DEEPEST else [VALUE]
        return found if 0 < len(found) <= _MOST_TEXTS else [VALUE]

    def _all_texts(self, node: ast.expr, scope: _Scope, depth: int) -> list[str]:
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return self._joined(parts, scope, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._joined([left, right], scope, depth)
            case ast.Name(id=name):
                return self._named(name, scope, depth)
            case ast.Attribute(attr=name) if name.isupper():  # of a class
                return self._constant(name, depth)
            case ast.Call(func=function):
                return self._returned(_name_of(function), node, scope, depth)
            case _:
                return self._any_of(_choices(node), scope, depth)

    def _any_of(self, nodes: Iterable[ast.expr], scope: _Scope, depth: int) -> list[str]:
        return _each([text for node in nodes for text in self._texts(node, scope, depth + 1)])

    def _joined(self, parts: list[ast.expr], scope: _Scope, depth: int) -> list[str]:
        texts = [self._texts(part, scope, depth + 1) for part in parts]
        return _each(["".join(each) for each in itertools.islice(itertools.product(*texts), _MOST_TEXTS + 1)])

    def _named(self, name: str, scope: _Scope, depth: int) -> list[str]:
        if name in scope.arguments:
            return scope.arguments[name]
        if values := scope.module.assigned.get((scope.function, name)):
            return self._any_of(values, scope, depth)
        return self._constant(name, depth, None if name in scope.module.imported else scope.module)

    def _constant(self, name: str, depth: int, place: _Module | None = None) -> list[str]:
        """The text of a constant, of this module or of any."""
        known = [(module, value) for module, value in self._constants.get(name, []) if place in (None, module)]
        return [text for module, value in known for text in self._texts(value, _Scope(module, None), depth + 1)]

    def _returned(self, name: str, call: ast.Call, scope: _Scope, depth: int) -> list[str]:
        """What a function of the package returns, if its name is that of one function only."""
        found = self._functions.get(name, [])
        if len(found) != 1:
            return [VALUE]
        module, function = found[0]
        inner = _Scope(module, function, self._arguments(function, call, scope, depth + 1))
        places = (node for node, place in module.inside.items() if place is function)
        return self._any_of(
            (node.value for node in places if isinstance(node, ast.Return) and node.value), inner, depth
        )


def _choices(node: ast.expr) -> list[ast.expr]:
    """The expressions of which one is the value of another."""
    match node:
        case ast.FormattedValue(value=value):
            return [value]
        case ast.IfExp(body=body, orelse=other):
            return [body, other]
        case ast.BoolOp(values=values):
            return values
        case _:
            return []


def _with_words(texts: list[str]) -> list[str]:
    """The texts that have words of their own."""
    return [text for text in texts if says_something(text)]


def _told_once(texts: list[str]) -> list[str]:
    """Of two texts of which one has values where the other has words: the other one, if these are many words."""
    left = set(texts)
    for general, other in itertools.permutations(texts, 2):
        if re.fullmatch(re.escape(general).replace(re.escape(VALUE), ".*"), other, flags=re.DOTALL):
            left.discard(general if len(other.split()) - len(general.split()) > 3 else other)
    return [text for text in texts if text in left]


def _each(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(f"{VALUE}{{2,}}", VALUE, text) for text in texts))


def _name_of(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""
