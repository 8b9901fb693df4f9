"""Brace patterns stand for the names that a shell makes of them, and nothing is looked up for them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from torchdistinput import FileDataset, list_files, readers
from torchdistinput.errors import SourceError
from torchdistinput.sources.storage.glob import MOST_NAMES, expand_braces

# Each pattern without spaces, and what bash makes of it.
SHELL = (
    "data-{000..012}.tar {3..1} {-2..2} {-02..2} {08..10} {1..010} {00..1} {5..5} {2..-2} a{b,c}{x,} {a} {} x{}y{1,2} "
    "{a,b}{1..3}/{c,d} x{,}y {1..2,3} }{a,b}{ {a..b}x {1..b} {,} {1...3} {1..2}..3} {a,b}}"
)


def test_names_are_those_that_a_shell_makes() -> None:
    for pattern in SHELL.split():
        if pattern == "{a..b}x":  # letters stay
            assert expand_braces(pattern) == [pattern]
            continue
        said = subprocess.run(["bash", "-c", f"printf '%s\\n' {pattern}"], capture_output=True, text=True, check=True)
        # A shell leaves out an empty word, as of {,}
        assert [name for name in expand_braces(pattern) if name] == said.stdout.split(), pattern


def test_a_name_with_braces_is_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "a{1,2}.txt").write_text("x\n")
    assert list_files(f"{tmp_path}/a{{1,2}}.txt") == [f"{tmp_path}/a{{1,2}}.txt"]


@pytest.mark.parametrize("pattern", ["a{b,c{1..2}}", "{{1..3},{a,b}}", "{a{b,c}", "{a{1..2}}"])
def test_braces_in_braces_are_refused(pattern: str) -> None:
    if pattern == "{a{b,c}":  # the first one has no end
        assert expand_braces(pattern) == ["{ab", "{ac"]
        return
    with pytest.raises(ValueError, match="has braces in braces; write the names"):
        expand_braces(pattern)


def test_braces_name_files_without_a_look_up_and_patterns_in_their_order(tmp_path: Path) -> None:
    assert list_files("s3://nobody/{01..03}-{a,b}.tar") == [
        f"s3://nobody/{number}-{letter}.tar" for number in ("01", "02", "03") for letter in "ab"
    ]
    assert list_files(["x.tar", "simplecache::gs://b/{2..1}.tar"])[1:] == [
        f"simplecache::gs://b/{n}.tar" for n in (2, 1)
    ]
    for name in ("b/2.txt", "b/1.txt", "a/3.txt", "c/4.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    data = FileDataset(f"{tmp_path}/{{b,a}}/*.txt", readers.text_lines)
    assert list(data) == ["b/1.txt", "b/2.txt", "a/3.txt"]
    try:
        for number in range(3):
            with fsspec.open(f"memory://braces/{number:03}.txt", "wt") as file:
                file.write(f"{number}\n")
        assert list(FileDataset("memory://braces/{000..002}.txt", readers.text_lines)) == ["0", "1", "2"]
    finally:
        MemoryFileSystem.store.clear()


def test_each_pattern_and_name_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(SourceError, match=re.escape(f"{tmp_path}/c*: the pattern matches no file")):
        list_files(f"{tmp_path}/{{a,c}}*")
    with pytest.raises(SourceError, match=r"b\.txt: cannot be opened"):
        list(FileDataset(f"{tmp_path}/{{a,b}}.txt", readers.text_lines))
    with pytest.raises(ValueError, match="a brace pattern stands for an empty name"):
        list_files("{,a}")


@pytest.mark.parametrize("pattern", ["{0..999999999}", "{0..9999}{0..9999}", "{1,2}" * 25])
def test_braces_that_stand_for_too_many_names_are_refused_at_once(pattern: str) -> None:
    with pytest.raises(ValueError, match=rf"stand for \d+ names or more; {MOST_NAMES} is the most"):
        expand_braces(pattern)


def test_braces_without_an_end_or_a_beginning_stay() -> None:
    assert expand_braces("{" * 300) == ["{" * 300]
    assert expand_braces("}" * 3000) == ["}" * 3000]
