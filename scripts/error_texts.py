"""The texts of the errors that the package raises, as they stand where it makes them: ``…`` stands for a value.

Where an error passes on what another error, a rank, a constant or a function says, there is no text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VALUE = "…"
KINDS_OF_ERRORS = [
    "ShardingError", "BatchingError", "RankDisagreement", "CoordinationTimeout", "RankLost", "SourceError",
    "StateMismatch", "InputError", "OutOfRangeError", "ValueError", "TypeError", "RuntimeError", "IndexError",
    "ImportError",
]  # fmt: skip


@dataclass(frozen=True)
class ErrorSite:
    """A place where the package makes an error.

    Args:
      kind: the name of the class.
      module: the dotted name of the module.
      line: its line there.
      text: what the error says; empty if it passes on another's words.
    """

    kind: str
    module: str
    line: int
    text: str


def error_sites(root: Path) -> Iterator[ErrorSite]:
    """Every place of the package that makes an error of a known kind."""
    for path in sorted((root / "torchdistinput").rglob("*.py")):
        module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id=kind), args=[said, *_]) if kind in KINDS_OF_ERRORS:
                    text = re.sub(f"{VALUE}{{2,}}", VALUE, _text(said))
                    has_words = len(text.replace(VALUE, " ").split()) > 3
                    yield ErrorSite(kind, module, node.lineno, text if has_words else "")
                case _:
                    pass


def _text(said: ast.expr) -> str:
    match said:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_text, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case _:
            return VALUE
