"""Tar archives in the layout of WebDataset: read as the package reads them, and refused where they are not whole."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.formats import Member, records_of, tar
from torchdistinput import readers
from torchdistinput.errors import SourceError
from torchdistinput.sources.datasets.fragment_dataset import FileDataset
from torchdistinput.sources.formats import webdataset
from torchdistinput.sources.formats.reader_api import facts_of


def other(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    """A member that is no file."""
    about = tarfile.TarInfo(name)
    about.type, about.linkname = kind, link
    return about


def read(content: bytes, keys: Sequence[str] | None = None) -> list[Any]:
    return list(readers.webdataset(keys)(io.BytesIO(content)))


def failing(content: bytes, keys: Sequence[str] | None = None) -> tuple[list[str], SourceError]:
    """The keys in front of the failure, and the failure."""
    found: list[str] = []
    with pytest.raises(SourceError) as caught:
        found.extend(sample["__key__"] for sample in readers.webdataset(keys)(io.BytesIO(content)))
    return found, caught.value


def by_the_package(path: Path, **settings: Any) -> list[dict[str, Any]]:
    wds = pytest.importorskip("webdataset")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = wds.WebDataset(str(path), shardshuffle=False, nodesplitter=None, empty_check=False, **settings)
        found = [dict(sample) for sample in data]
    for sample in found:
        sample.pop("__url__")
        sample.pop("__local_path__", None)
    return found


ODD_NAMES: list[Member | tarfile.TarInfo] = [
    other("./", tarfile.DIRTYPE),
    ("./a/b/000.jpg", b"1"),
    ("./a/b/000.seg.PNG", b"2" * 511),
    ("./a/b/001.jpg", b"3" * 512),
    ("./a/b/001.cls", b"4" * 513),
    ("a/b/001.cls", b""),
    ("README", b"no sample"),
    (".hidden.jpg", b"no sample"),
    ("__meta__/info.json", b"no sample"),
    ("__index__", b"no sample"),
    other("x/", tarfile.DIRTYPE),
    ("x.y/z.txt", b"a dot in the folder"),
    ("x.y/z.", b"no extension"),
    ("e", b"no dot"),
    ("long/" * 15 + "name.txt", b"a prefix"),
    ("a/b/001.cls", b"the key comes again"),
    ("only.one", b"a sample without a pair"),
    ("d\u00fcr/\u4e2d.txt", b"UTF-8"),
    ("last.bin", bytes(range(256)) * 300),
]
FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


# ---------------------------------------------------------------------------------------------- beside the package


@pytest.mark.parametrize("form", FORMS)
def test_samples_are_those_that_the_package_reads(form: str, tmp_path: Path) -> None:
    members = ODD_NAMES if form == "ustar" else [*ODD_NAMES, ("very-long/" * 40 + "name.txt", b"an extended header")]
    (tmp_path / "a.tar").write_bytes(tar(members, FORMS[form]))
    wanted = by_the_package(tmp_path / "a.tar")
    assert len(wanted) == (9 if form == "ustar" else 10)
    assert read((tmp_path / "a.tar").read_bytes()) == wanted
    (tmp_path / "a.tgz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    assert by_the_package(tmp_path / "a.tgz") == wanted
    assert [*FileDataset(f"{tmp_path}/a.tgz", readers.webdataset())] == wanted


# -------------------------------------------------------------------------------------------------------------- keys

PAIRS: list[Member] = [
    member
    for number in range(6)
    for member in ((f"{number}.jpg", b"j" * 300 * number), (f"{number}.json", b"{}"), (f"{number}.cls", b"%d" % number))
]


def test_keys_choose_the_extensions_and_their_order_and_others_are_not_read() -> None:
    class Counted(io.BytesIO):
        count = 0

        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            self.count += len(found)
            return found

    members = [(name, bytes(40_000) if name.endswith("jpg") else data) for name, data in PAIRS]
    content = Counted(tar(members))
    (enter,) = filter(None, [facts_of(readers.webdataset(keys=["cls", ".JSON"])).blocks])
    found = [sample for _, samples in enter(content, 0) for sample in samples]
    assert [[*sample] for sample in found] == [["__key__", "cls", "json"]] * 6
    assert [sample["cls"] for sample in found] == [b"%d" % number for number in range(6)]
    assert content.count < 30_000 < 6 * 40_000


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"keys": "jpg"}, TypeError, "keys must be a list of extensions"),
        ({"keys": [1]}, TypeError, "keys must be a list of extensions"),
        ({"keys": []}, ValueError, "keys must be one or more extensions"),
        ({"keys": ["jpg", "JPG"]}, ValueError, "each once"),
    ],
)
def test_arguments_that_cannot_be_right(settings: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        readers.webdataset(**settings)


# -------------------------------------------------------------------------------------------------------- bad input


def test_an_empty_archive_has_no_samples_and_an_empty_file_is_none() -> None:
    assert read(tar([])) == []
    assert read(tar([other("./", tarfile.DIRTYPE), ("README", b"")])) == []
    assert "at byte 0 without its end mark" in str(failing(b"")[1])


@pytest.mark.parametrize("form", FORMS)
def test_an_archive_that_is_cut_anywhere_is_an_error_after_its_whole_samples(form: str) -> None:
    members = [("a.txt", b"1"), ("a.cls", b"2" * 600), ("b.txt", b"3"), ("b" * 120 + ".cls", b"4")]
    content = tar(members if form != "ustar" else [*members[:3], ("b/" * 60 + "b.cls", b"4")], FORMS[form])
    end = len(content.rstrip(b"\0")) // 512 * 512 + 512
    whole = [sample["__key__"] for sample in read(content)]
    starts = [offset for offset in range(0, end, 512) if content[offset : offset + 6] in (b"b.txt\0", b"a.txt\0")]
    for size in range(0, end + 512, 100 if form == "pax" else 64):
        found, error = failing(content[:size])
        assert found == whole[: len(found)]
        assert len(found) <= sum(start < size for start in starts)
        assert error.resume_at is None
        assert "cut off" in str(error) or "end mark" in str(error)
    assert [sample["__key__"] for sample in read(content[: end + 512])] == whole


def test_a_file_that_goes_on_behind_the_end_of_its_archive_is_refused() -> None:
    first = tar(PAIRS[:3])
    for rest in (tar(PAIRS[3:]), b"x"):
        found, error = failing(first + bytes(2_000_000) + rest)
        assert found == ["0"]
        assert "but the file goes on: it may be several archives in one file" in str(error)


DAMAGES: dict[str, tuple[list[Member | tarfile.TarInfo], Sequence[str] | None, str]] = {
    "a member without its pair": ([("b.jpg", b"2")], ["jpg", "cls"], "'cls' of keys=.* is not there; the members of a"),
    "nothing of it is wanted": ([("b.txt", b"2")], ["jpg"], "'jpg' of keys=.* is not there"),
    "a name twice": ([("b.jpg", b"2"), ("b.cls", b"3"), ("b.JPG", b"4")], None, "'jpg' comes twice"),
    "a hard link": ([("b.jpg", b"2"), other("b.cls", tarfile.LNKTYPE, "a.cls")], None, "'cls' is a link; make"),
    "a symbolic link": ([other("b.jpg", tarfile.SYMTYPE, "a.jpg")], None, "'jpg' is a link; make the archive with tar"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_sample_that_is_not_whole_is_an_error_and_reading_can_go_on_behind_it(name: str, tmp_path: Path) -> None:
    damaged, keys, said = DAMAGES[name]
    content = tar([("a.jpg", b"0"), ("a.cls", b"1"), *damaged, ("c.jpg", b"5"), ("c.cls", b"6")])
    found, error = failing(content, keys)
    assert found == ["a"]
    assert f"the sample 'b' at byte {error.offset}: " in str(error)
    with pytest.raises(SourceError, match=said):
        raise error
    (tmp_path / "a.tar").write_bytes(content)
    data = FileDataset([f"{tmp_path}/a.tar"], readers.webdataset(keys=keys))
    kinds = [type(each).__name__ for each in records_of(data.reader([0], 0, skip=True))]
    assert kinds == ["dict", "CorruptRecord", "dict"]


def test_sparse_files_are_refused() -> None:
    sparse = bytearray(tar([("a.bin", b"")])[:512])
    sparse[156:157] = b"S"
    content = checked(sparse) + tar([("b.bin", b"1")])
    with pytest.raises(SourceError, match="the sample 'a' at byte 0: 'bin' is a sparse file"):
        read(content)


def checked(header: bytearray) -> bytes:
    """The header with its checksum."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def test_bytes_that_are_no_archive_are_told() -> None:
    for content in (gzip.compress(random.Random(1).randbytes(3000)), b"text\n" * 500, random.Random(0).randbytes(2000)):
        found, error = failing(content)
        assert not found
        assert "the header at byte 0 cannot be read" in str(error)
        assert 'compression="gzip"' in str(error)


@pytest.mark.parametrize("form", FORMS)
def test_damaged_headers_are_errors_or_read_as_tarfile_reads_them(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a checksum that fits, so that the damage is read."""
    rng = random.Random(form)
    about = tarfile.TarInfo("a" * 150 + ".txt" if form != "ustar" else "a.txt")
    about.mtime = 1.5  # a pax record
    content = tar([about, ("b.txt", b"22")], FORMS[form])
    for _ in range(600):
        damaged = bytearray(content[: 512 * 8])
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.choice((rng.randrange(2048), 512 + rng.randrange(40)))] = rng.choice(
                b"0129=\n ,.xgLSK\x80\xff\0"
            )
        for start in range(0, 512 * 4, 512):
            if rng.random() < 0.7 and damaged[start + 257 : start + 262] == b"ustar":
                damaged[start : start + 512] = checked(damaged[start : start + 512])
        found = read_or_none(bytes(damaged))
        with monkeypatch.context() as patched:
            patched.setattr(webdataset, "_ordinary", lambda _: None)
            wanted = read_or_none(bytes(damaged))
        assert wanted in (None, found)  # tarfile also refuses what is not needed, as a time that is no number


def read_or_none(content: bytes) -> list[Any] | None:
    try:
        return read(content)
    except SourceError:
        return None


def test_headers_that_claim_much_are_not_believed() -> None:
    header = bytearray(tar([("a.bin", b"")])[:512])
    for kind, size in ((b"0", b"77777777777\0"), (b"x", b"77777777777\0"), (b"L", b"00000000001\0")):
        header[156:157], header[124:136] = kind, size
        found, error = failing(checked(header) * 40)
        assert not found
        assert "cut off" in str(error) or "extended header" in str(error)
    header[156:157] = b"0"
    header[124:136] = b"\x80" + (1 << 60).to_bytes(11, "big")
    assert "needs 1152921504606847488 bytes" in str(failing(checked(header))[1])
    header[124:136] = b"\xff" * 12
    assert "cannot be read" in str(failing(checked(header))[1])
