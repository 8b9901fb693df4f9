"""Runs the pages of ``examples/`` as notebooks, and compares what their cells print with what the pages show.

    python scripts/run_pages.py examples/guide.md          # says how many cells ran, and where a page is wrong
    python scripts/run_pages.py --write examples/guide.md  # writes into the page what its cells print

A page is a MyST Markdown notebook. Its cells run in one namespace, each page in a process and a folder of its own. The
block of ``text`` that follows a cell is what the cell prints; without such a block the output is not compared. A cell
may also be what IPython knows: ``%%writefile NAME``, ``!torchrun --nproc-per-node N SCRIPT``, ``!python SCRIPT``. With
the tag ``raises-exception`` it ends with an exception, whose last lines are its output.

No Jupyter kernel: it would start, and import torch, for each page, and its outputs are not in the text, so nobody
would see in a diff that a page says something else. Here a process that has imported torch once forks for each page and
for each rank. (Jupyter with jupytext opens the same files.)
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch._dynamo  # which the constructor of an optimizer imports

from torchdistinput.testing.ranks import free_port

ROOT = Path(__file__).resolve().parents[1]
CELL = re.compile(
    r"^```\{code-cell\}[^\n]*\n(?P<options>(?::[^\n]*\n)*)\n?(?P<code>.*?)^```\n(?P<gap>\n*)(?:^```text\n(?P<output>.*?)^```\n)?",
    flags=re.DOTALL | re.MULTILINE,
)


class Cell(NamedTuple):
    """A cell of a page.

    Args:
      line: where its code begins.
      code: its code.
      output: what the page says that it prints; ``None`` if the page says nothing.
      fails: whether it ends with an exception.
    """

    line: int
    code: str
    output: str | None
    fails: bool


def cells_of(text: str) -> list[Cell]:
    """The cells of a page, in order."""
    return [
        Cell(text.count("\n", 0, each.start("code")) + 1, each["code"], each["output"], "raises" in each["options"])
        for each in CELL.finditer(text)
    ]


def with_outputs(text: str, outputs: list[str]) -> str:
    """The page with other outputs, where it shows any."""
    left = iter(outputs)

    def replaced(found: re.Match[str]) -> str:
        output = next(left)
        if found["output"] is None:
            return found[0]
        start, end = found.start("output") - found.start(), found.end("output") - found.start()
        return found[0][:start] + output + found[0][end:]

    return CELL.sub(replaced, text)


# ------------------------------------------------------------------------------------------------- a page's process


class Page:
    """Runs the cells of a page; asks the first process to start scripts.

    Args:
      path: the page.
      start: starts a script on so many ranks; gives for each rank the exit code, and what it printed.
    """

    def __init__(self, path: Path, start: Callable[[int, list[str]], list[tuple[int, str, str]]]) -> None:
        self._path = path
        self._start = start
        self._main = types.ModuleType("__main__")
        sys.modules["__main__"] = self._main  # where pickle looks for what cells define

    def output(self, cell: Cell) -> str:
        """What a cell prints.

        Raises:
          RuntimeError: the cell failed, or did not fail where it should.
        """
        printed = io.StringIO()
        failed = ""
        try:
            with contextlib.redirect_stdout(printed):
                self._run(cell)
        except Exception as error:  # of any kind: it is part of what the page shows
            failed = "".join(traceback.format_exception_only(error))
            if not cell.fails:
                story = "".join(traceback.format_exception(error))
                raise RuntimeError(f"{self._path}:{cell.line}: the cell failed\n{story}") from error
        if cell.fails and not failed:
            raise RuntimeError(f"{self._path}:{cell.line}: the cell should have failed")
        return printed.getvalue() + failed

    def _run(self, cell: Cell) -> None:
        first, _, rest = cell.code.partition("\n")
        if first.startswith("%%writefile "):
            Path(first.split()[1]).write_text(rest)
        elif first.startswith("!"):
            for line in cell.code.splitlines():
                self._command(shlex.split(line.lstrip("!"), comments=True))
        else:
            exec(compile("\n" * (cell.line - 1) + cell.code, str(self._path), "exec"), self._main.__dict__)

    def _command(self, words: list[str]) -> None:
        match words:
            case ["torchrun", "--nproc-per-node", count, *script]:
                ended = self._start(int(count), script)
            case ["python", *script]:
                ended = self._start(0, script)
            case _:
                raise RuntimeError(f"no such command here: {shlex.join(words)}")
        for code, printed, errors in ended:
            sys.stdout.write(re.sub(r"\[Gloo\] Rank \d+ is connected to [^\n]*\n", "", printed))  # by torch 2.8
            if code:
                raise RuntimeError(f"{shlex.join(words)} ended with {code}:\n{errors}")


# ------------------------------------------------------------------------------------------------ the first process


def run_page(path: Path) -> list[str]:
    """Runs a page in a fork, starts scripts for it, and gives the outputs of its cells.

    Raises:
      RuntimeError: a cell failed.
    """
    folder = tempfile.mkdtemp(prefix="page-")
    (asked, asks), (answered, answers) = os.pipe(), os.pipe()
    page = fork(lambda: talk(path, folder, asks, answered))
    os.close(asks)
    os.close(answered)
    last: Any = {"error": f"{path}: the process of the page died"}
    with os.fdopen(asked) as requests, os.fdopen(answers, "w") as replies:
        for line in requests:
            last = json.loads(line)
            if isinstance(last, dict):
                break
            print(json.dumps(start_scripts(last[0], last[1], folder)), file=replies, flush=True)
    os.waitpid(page, 0)
    shutil.rmtree(folder)
    if "error" in last:
        raise RuntimeError(last["error"])
    return list(last["outputs"])


def fork(work: Callable[[], object]) -> int:
    """Does something in a new process, which then ends as a script does; gives its number."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except Exception:  # of any kind: no frame of the first process is to see it
        traceback.print_exc()
        sys.exit(1)
    sys.exit()


def talk(path: Path, folder: str, asks: int, answered: int) -> None:
    """Runs a page in this process, and tells the first one what came of it."""
    enter(folder)
    with os.fdopen(asks, "w") as requests, os.fdopen(answered) as replies:

        def start(world: int, script: list[str]) -> list[tuple[int, str, str]]:
            print(json.dumps([world, script]), file=requests, flush=True)
            return [(code, out, errors) for code, out, errors in json.loads(replies.readline())]

        page = Page(path, start)
        try:
            last: Any = {"outputs": [page.output(cell) for cell in cells_of(path.read_text())]}
        except RuntimeError as error:
            last = {"error": str(error)}
        print(json.dumps(last), file=requests)


def enter(folder: str) -> None:
    """Makes the folder that of this process, and lets it import from there and from ``examples/``."""
    os.chdir(folder)
    sys.path[:0] = [folder, str(ROOT / "examples"), str(ROOT)]


def start_scripts(world: int, script: list[str], folder: str) -> list[tuple[int, str, str]]:
    """Runs the ranks of a script (0: a process without ranks); gives exit code, output and errors of each."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0"}
    told |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "none"}
    outputs = tempfile.mkdtemp(prefix="ranks-")
    ranks = []
    for rank in range(max(1, world)):
        files = [Path(outputs, f"{rank}.{stream}") for stream in ("out", "err")]
        environment = {**told, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {}
        ranks.append((fork(lambda: run_script(script, folder, files, environment)), files))  # noqa: B023 - runs at once
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank, _ in ranks]
    texts = [[file.read_text() for file in files] for _, files in ranks]
    shutil.rmtree(outputs)
    return [(code, out, errors) for code, (out, errors) in zip(codes, texts, strict=True)]


def run_script(command: list[str], folder: str, files: list[Path], environment: dict[str, str]) -> None:
    """Runs a script as the main program of this process, which prints into files."""
    for number, path in enumerate(files, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment)
    enter(folder)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def differences(path: Path, outputs: list[str]) -> list[str]:
    """Where a page says something else than its cells print."""
    found = []
    for cell, output in zip(cells_of(path.read_text()), outputs, strict=True):
        if cell.output is not None and cell.output != output:
            lines = difflib.unified_diff(cell.output.splitlines(), output.splitlines(), "page", "cell", lineterm="")
            found.append("\n".join([f"{path}:{cell.line}: the cell prints something else", *lines]))
    return found


def main() -> None:
    """Runs the pages that the command names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write what the cells print into the pages")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    wrong = []
    for path in [each.resolve() for each in asked.pages]:
        try:
            outputs = run_page(path)
        except RuntimeError as error:
            wrong.append(str(error))
            continue
        print(f"{path}: {len(outputs)} cells ran")
        if asked.write:
            path.write_text(with_outputs(path.read_text(), outputs))
        wrong += differences(path, outputs)
    sys.exit("\n\n".join(wrong) or None)


if __name__ == "__main__":
    main()
