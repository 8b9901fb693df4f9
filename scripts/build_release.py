"""Builds a release from the commit that is checked out, and tries it: ``scripts/release`` calls it. Uploads nothing.

    scripts/release FOLDER                   an sdist and a wheel in FOLDER, which is outside of this repository
    scripts/release FOLDER --pages ADDRESS   the same; README.md's links lead to ADDRESS, where this tree can be seen
    scripts/release --check                  in a temporary folder, and tries them

``--check`` lets twine look at the archives. Then it installs the wheel into an empty environment with the lowest
release of each dependency, and into one with the torch of constraints.txt and the newest of all others (``--torch``:
with these releases instead). There it runs the first program of README.md, in one process and under torchrun in two;
mypy has to see the types. It takes some GB for a while, and an interpreter for which all of these releases exist.

A package index shows README.md, but none of the files that it links to: without ``--pages`` these links are dead there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASED = ("README.md", "examples", "pyproject.toml", "torchdistinput")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]*)\)")
SECONDS = 300.0
INSTALL_SECONDS = 1800.0
NEEDED_TO_PUBLISH = {"License-Expression": "license", "Author-email": "authors", "Project-URL": "urls"}

BEFORE = """
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
from torch.utils.data import TensorDataset
train = TensorDataset(torch.randn(600, 4), torch.randint(0, 3, (600,)))
test = TensorDataset(torch.randn(101, 4), torch.randint(0, 3, (101,)))
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
"""What the first program of README.md takes as given."""

AFTER = """
from pathlib import Path
weights = [round(value, 5) for value in torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()]
text = f"steps {loader.step.index + 1} accuracy {accuracy:.5f} weights {weights}"
Path(f"{strategy.num_input_pipelines}-{strategy.input_pipeline_id}.txt").write_text(text)
"""
"""Writes what came of it, a file for each rank."""

TYPED = """
import torchdistinput
reveal_type(torchdistinput.Strategy().rank)
"""


def snippets(text: str) -> list[str]:
    """The programs that a page shows."""
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


# ----------------------------------------------------------------------------------------------------------- archives


def build(folder: Path, place: Path, tools: Path, pages: str | None) -> tuple[Path, Path]:
    """Builds both archives into the folder, the wheel from the sdist; gives their paths.

    Raises:
      SystemExit: the tree has changes that are in no commit, or the build failed.
    """
    if changed := run(["git", "status", "--porcelain"], ROOT):
        raise SystemExit(f"a release is built from a commit, and these files are in none:\n{changed}")
    source = place / "source"
    source.mkdir()
    run(["git", "archive", "--output", str(place / "source.tar"), "HEAD", *RELEASED], ROOT)
    with tarfile.open(place / "source.tar") as archive:
        archive.extractall(source, filter="data")
    if pages is not None:
        readme = source / "README.md"
        readme.write_text(with_address(readme.read_text(), pages))
    os.environ["SOURCE_DATE_EPOCH"] = run(["git", "log", "-1", "--format=%ct"], ROOT).strip()  # equal bytes at any time
    run([str(tools), "-m", "build", "--outdir", str(folder), str(source)], place, INSTALL_SECONDS)
    name = f"torchdistinput-{version_of(source)}"
    return folder / f"{name}.tar.gz", folder / f"{name}-py3-none-any.whl"


def version_of(root: Path) -> str:
    """The version, from the one place where it stands."""
    return first(r'^version = "(.*)"$', root / "pyproject.toml")


def first(pattern: str, file: Path) -> str:
    """The first thing in a file that a pattern finds."""
    found: list[str] = re.findall(pattern, file.read_text(), flags=re.MULTILINE)
    return found[0]


def with_address(text: str, pages: str) -> str:
    """A page whose links work elsewhere too: relative ones lead to the address."""
    base = pages.rstrip("/")

    def linked(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        asked = "?raw=true" if picture else ""  # a host that shows files on pages of its own is to give the file itself
        return f"{picture}[{words}]({base}/{target}{asked})"

    return LINK.sub(linked, text)


def metadata(wheel: Path) -> Message:
    """What a package index is told of a wheel."""
    with zipfile.ZipFile(wheel) as zipped:
        (name,) = (each for each in zipped.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(zipped.read(name).decode())


def description(wheel: Path) -> str:
    """What a package index shows as the page of the project: README.md."""
    return str(metadata(wheel).get_payload())


def lowest(wheel: Path) -> list[str]:
    """The lowest release of each dependency."""
    needs = [each for each in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in each]
    return [each.replace(">=", "==") for each in needs]


# -------------------------------------------------------------------------------------------------------- environments


def run(command: Sequence[str], folder: Path, seconds: float = SECONDS) -> str:
    """Runs a command that knows nothing of this tree; gives what it prints.

    Raises:
      SystemExit: it failed, or took too long.
    """
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks, too
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            raise SystemExit(f"{shlex.join(command)} took more than {seconds:.0f} s") from None
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}:\n{printed}")
    return printed


def environment_with(packages: Sequence[str], folder: Path) -> Path:
    """Makes an environment with the packages; gives its interpreter."""
    run([sys.executable, "-m", "venv", str(folder)], folder.parent)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip"]
    run([*pip, "install", "--quiet", "--only-binary", ":all:", *packages], folder.parent, INSTALL_SECONDS)
    run([*pip, "check"], folder.parent)
    return python


def try_wheel(wheel: Path, pins: Sequence[str], place: Path, tools: Path) -> None:
    """Installs the wheel beside pinned packages, and uses it as a user would.

    Raises:
      SystemExit: something did not work.
    """
    with tempfile.TemporaryDirectory(prefix="try-", dir=place) as name:
        folder = Path(name, "empty")
        folder.mkdir()
        began = time.monotonic()
        python = environment_with([str(wheel), *pins], Path(name, "environment"))
        tell(f"installed with {' '.join(pins)}", began)
        run_example(python, folder, wheel)
        (folder / "typed.py").write_text(TYPED)
        began = time.monotonic()
        command = [str(tools), "-m", "mypy", "--strict", "--cache-dir", name, "--python-executable", str(python)]
        typed = run([*command, "typed.py"], folder, INSTALL_SECONDS)
        expect(re.search(r'Revealed type is "(builtins\.)?int"', typed) is not None, typed)
        tell("mypy sees the types", began)


def run_example(python: Path, folder: Path, wheel: Path) -> None:
    """Runs the first program of the description, on one rank and on two, which must agree."""
    (folder / "train.py").write_text(BEFORE + snippets(description(wheel))[0] + AFTER)
    began = time.monotonic()
    run([str(python), "train.py"], folder)
    (folder / "checkpoint.pt").unlink()
    torchrun = [str(python.with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    run([*torchrun, "train.py"], folder)
    results = [(folder / f"{rank}.txt").read_text() for rank in ("1-0", "2-0", "2-1")]
    expect(results == results[:1] * 3, "\n".join(results))
    tell("the first program of README.md gives the same on one rank and on two", began)


def expect(holds: bool, found: str) -> None:  # noqa: FBT001 - a condition
    """Ends the script unless something holds.

    Raises:
      SystemExit: it does not hold.
    """
    if not holds:
        raise SystemExit(f"not what was expected:\n{found}")


def tell(what: str, began: float) -> None:
    """Says what was done, and how long it took."""
    print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)


def check(place: Path, releases: Sequence[str], pages: str | None) -> None:
    """Builds a release, and tries it.

    Raises:
      SystemExit: something is wrong with it.
    """
    began = time.monotonic()
    tools = environment_with(["build", "mypy", "twine"], place / "tools")
    sdist, wheel = build(place / "built", place, tools, pages)
    tell(f"built {sdist.name} and {wheel.name}", began)
    run([str(tools), "-m", "twine", "check", "--strict", str(sdist), str(wheel)], place)
    told = metadata(wheel)
    if dead := len(LINK.findall(description(wheel))):
        print(f"{dead} links of README.md lead nowhere on a package index, without --pages")
    if missing := [name for field, name in NEEDED_TO_PUBLISH.items() if field not in told]:
        print(f"for whoever publishes to write into pyproject.toml: {', '.join(missing)}")
    pinned = first(r"^(torch==\S+)$", ROOT / "constraints.txt")
    trials = [[f"torch=={release}"] for release in releases] or [lowest(wheel), [pinned]]
    for pins in trials:
        try_wheel(wheel, pins, place, tools)


def main() -> None:
    """Does what the command says.

    Raises:
      SystemExit: it says nothing useful, or something failed.
    """
    parser = argparse.ArgumentParser(prog="scripts/release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where to put the sdist and the wheel")
    parser.add_argument("--check", action="store_true", help="try what was built; nothing is kept")
    parser.add_argument("--pages", metavar="ADDRESS", help="where the files of this release can be seen")
    parser.add_argument("--torch", nargs="+", default=[], metavar="RELEASE", help="the releases of torch for --check")
    asked = parser.parse_args()
    if (asked.folder is None) != asked.check:
        parser.error("either a folder, or --check")
    if asked.folder is not None and asked.folder.resolve().is_relative_to(ROOT):
        parser.error(f"{asked.folder} is in the repository; nothing built belongs there")
    with tempfile.TemporaryDirectory(prefix="release-") as place:
        if asked.check:
            check(Path(place), asked.torch, asked.pages)
        else:
            tools = environment_with(["build"], Path(place, "tools"))
            for built in build(asked.folder.resolve(), Path(place), tools, asked.pages):
                print(built)


if __name__ == "__main__":
    main()
