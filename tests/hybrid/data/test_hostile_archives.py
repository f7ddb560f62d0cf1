"""Downloads are checked; archives and IDX files made to harm are one line, within bounds."""

import contextlib
import gzip
import io
import json
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pooch
import pytest
import requests
from answers import refusal
from hypothesis import given
from hypothesis import strategies as st

from hybrid.data import fetch, sources
from hybrid.data.files import download
from hybrid.data.files.download import extract
from hybrid.data.files.formats import read_idx

GUARDED = Path(__file__).parents[2] / "support" / "guarded_load.py"


def entry(name, content=b"", kind=tarfile.REGTYPE, link="", **more):
    made = tarfile.TarInfo(name)
    made.size, made.type, made.linkname = len(content), kind, link
    for key, value in more.items():
        setattr(made, key, value)
    return made, content


def tar(*entries, form=tarfile.GNU_FORMAT):
    packed = io.BytesIO()
    for made, content in entries:
        block = made.tobuf(form)
        packed.write(block + content + bytes(-len(content) % 512))
    return packed.getvalue() + bytes(1024)


def header_of_size(size):
    """A header whose size is another one than that of what follows."""
    return tar(entry("a.bin", size=size))


ZEROS = gzip.compress(bytes(1 << 25))
SPARSE = tarfile.GNUTYPE_SPARSE
HOSTILE = {
    "a link": tar(entry("a.bin", kind=tarfile.SYMTYPE, link="/etc/passwd")),
    "a link, then through it": tar(
        entry("top", kind=tarfile.SYMTYPE, link="/tmp"), entry("top/a.txt", b"x")
    ),
    "a pipe": tar(entry("a.bin", kind=tarfile.FIFOTYPE)),
    "a device": tar(entry("a.bin", kind=tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "a folder": tar(entry("a.bin", kind=tarfile.DIRTYPE)),
    "holes": tar(entry("a.bin", kind=SPARSE)),
    "8 EB claimed": header_of_size(1 << 62),
    "a negative size": header_of_size(-1024),
    "100 MB of zeros": tar(entry("big", size=100_000_000))[:512],
    "100 MB of a name": tar(entry("././@LongLink", kind=b"L", size=100_000_000))[:512],
    "no end": header_of_size(5)[:512],
    "no tar": b"x" * 5000,
    "no end of a header": header_of_size(5)[:100],
}


def test_a_hostile_archive_is_one_line_within_bounds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tar")  # a short name: what was seen of a file is cut off
    files = {folder / f"{number}.tar.gz": name for number, name in enumerate(HOSTILE)}
    for file, name in files.items():
        after = ZEROS * 3 if name.startswith("100 MB") else b""
        file.write_bytes(gzip.compress(HOSTILE[name], 1) + after)
    command = [sys.executable, str(GUARDED), "tar", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["file"]: row for row in map(json.loads, done.stdout.splitlines())}
    for file, name in files.items():
        row = rows[str(file)]
        assert row["error"].startswith(f"ValueError: {file} "), name
        assert row["error"].isprintable(), name
        scratch = f"open {file.with_suffix('')}.out/tmp"
        assert [event for event in row["seen"] if not event.startswith(scratch)] == [], name
        assert row["seconds"] < 20, name
    assert {p for p in folder.rglob("*") if p.is_file()} == {*files}


def packed_in(folder, *entries, **how):
    """An archive of these members."""
    path = folder / "x.tar.gz"
    path.write_bytes(gzip.compress(tar(*entries, **how), 1))
    return path


def files(folder):
    return sorted(str(x.relative_to(folder)) for x in folder.rglob("*") if not x.is_dir())


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil"])
def test_a_path_of_the_archive_never_reaches_the_disk(tmp_path, name):
    inner = tmp_path / "inner"
    inner.mkdir()
    packed = packed_in(inner, entry(name, b"E"), entry("../../a.bin", b"A"))
    extract(packed, ["a.bin"], inner / "out")
    assert files(tmp_path) == ["inner/out/a.bin", "inner/x.tar.gz"]


@pytest.mark.parametrize(
    ("entries", "missing"),
    [
        ([entry("a.bin", kind=tarfile.SYMTYPE, link="/etc/passwd"), entry("b.bin", b"B")], "a.bin"),
        ([entry("other.bin", b"A")], "a.bin, b.bin"),
    ],
)
def test_members_that_are_missing_or_no_regular_files_are_named(tmp_path, entries, missing):
    packed = packed_in(tmp_path, *entries)
    said = refusal(extract, packed, ["b.bin", "a.bin"], tmp_path / "out")
    assert f"x.tar.gz holds no {missing}" in said
    assert "out/a.bin" not in files(tmp_path)


@pytest.mark.parametrize("keep", [0, 2000])
def test_a_truncated_archive_is_refused_and_leaves_no_half_written_file(tmp_path, keep):
    packed = packed_in(tmp_path, entry("a.bin", bytes(x * x % 251 for x in range(1 << 16))))
    content = packed.read_bytes()
    assert len(content) > 200
    packed.write_bytes(content[: min(keep, len(content) - 50)])
    assert "x.tar.gz" in refusal(extract, packed, ["a.bin"], tmp_path / "out")
    assert files(tmp_path / "out") == []


def test_a_file_that_is_there_is_not_downloaded_again(tmp_path):
    (tmp_path / "x.gz").write_bytes(b"A")
    checksum = "7fc56270e7a70fa81a5935b72eacbe29"
    assert download.retrieve("http://host/x.gz", checksum, tmp_path) == tmp_path / "x.gz"


def test_of_two_members_with_one_name_the_first_is_taken(tmp_path):
    packed = packed_in(tmp_path, entry("t/a.bin", b"1"), entry("t/a.bin", b"2"))
    extract(packed, ["a.bin"], tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"1"


def test_a_link_where_a_member_goes_is_replaced_and_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "a.bin").symlink_to(precious)
    extract(packed_in(tmp_path, entry("a.bin", b"1")), ["a.bin"], folder)
    assert (precious.read_bytes(), (folder / "a.bin").read_bytes()) == (b"mine", b"1")


@given(st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), min_size=1, max_size=8))
def test_an_archive_with_other_bytes_in_its_header_is_read_or_refused(tmp_path, changes):
    content = bytearray(tar(entry("t/a.bin", b"1" * 700), form=tarfile.PAX_FORMAT))
    for place, value in changes:
        content[place] = value
    packed, out = tmp_path / "x.tar.gz", tmp_path / "out"
    packed.write_bytes(gzip.compress(bytes(content), 1))
    with contextlib.suppress(ValueError):
        extract(packed, ["a.bin"], out)
    assert {p.name for p in tmp_path.rglob("*")} <= {"x.tar.gz", "out", "a.bin"}


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_a_file_where_the_data_folder_should_be_is_named(tmp_path, monkeypatch, place):
    root = tmp_path / "data"
    if place:
        root.mkdir()
    (root / place).write_text("mine")
    packed = packed_in(tmp_path, entry("data_batch_1.bin", b"1"))

    def retrieve(*_args, path, **_settings):
        Path(path).mkdir(exist_ok=True)
        return str(packed)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(FileNotFoundError, match=f"{root / place}: File exists"):
        fetch("cifar10", root)
    assert (root / place).read_text() == "mine"


@pytest.mark.parametrize(
    "name", [n for n, (_, made) in sources.CATALOG.items() if isinstance(made, sources.Source)]
)
def test_every_download_has_a_checksum_and_a_plain_name(tmp_path, monkeypatch, name):
    asked = []

    def retrieve(url, known_hash, fname, path):
        asked.append((known_hash, fname, Path(path)))
        raise requests.ConnectionError

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    for wanted in sources.CATALOG[name][1].downloads:
        with pytest.raises(requests.ConnectionError):
            wanted.into(tmp_path)
    for checksum, file, folder in asked:
        assert len(bytes.fromhex(checksum.removeprefix("md5:"))) == 16
        assert Path(file).name == file
        assert folder in (tmp_path, tmp_path / wanted.folder)


def test_what_a_server_sends_in_place_of_the_file_is_not_kept(tmp_path, monkeypatch):
    def other(_self, _url, dest, *_args):
        Path(dest).write_bytes(b"not it")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", other)
    wanted = download.Download("http://host/x.tar.gz", "0" * 32, "folder", ("a.bin",))
    with pytest.raises(ValueError, match="does not have the MD5 checksum"):
        wanted.into(tmp_path)
    assert list(tmp_path.iterdir()) == []


def idx(*shape, data=b""):
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def test_an_idx_bomb_is_refused_by_its_header(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(idx(60_000, 28, 28 * 8) + bytes(1 << 20)))
    with pytest.raises(ValueError, match=r"holds an array of shape \(60000, 28, 224\), expected"):
        read_idx(path, (60_000, 28, 28))


@pytest.mark.parametrize("sizes", [(1 << 32) - 1, 1 << 29])
def test_an_idx_file_that_unpacks_without_end_is_left_early(tmp_path, sizes, monkeypatch):
    monkeypatch.setattr("hybrid.data.files.formats.MOST_BYTES", 1 << 20)
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(idx(sizes) + bytes(1 << 22)))
    with pytest.raises(ValueError, match=f"has 1048585 or more bytes, expected {sizes + 8}"):
        read_idx(path)
