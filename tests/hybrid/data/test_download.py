"""Downloads are checked, and archives write their expected members only."""

import io
import tarfile

import pytest

from hybrid.data.files.download import extract, retrieve


def archive(path, entries):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in entries:
            entry = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            else:
                entry.type, entry.linkname = content
                tar.addfile(entry)
    return path


def files(directory):
    return sorted(str(x.relative_to(directory)) for x in directory.rglob("*") if not x.is_dir())


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "top/../../evil"])
def test_a_path_of_the_archive_never_reaches_the_disk(tmp_path, name):
    inner = tmp_path / "inner"
    inner.mkdir()
    packed = archive(inner / "x.tar.gz", [(name, b"E"), ("../../a.bin", b"A")])
    extract(packed, ["a.bin"], inner / "out")
    assert files(tmp_path) == ["inner/out/a.bin", "inner/x.tar.gz"]


@pytest.mark.parametrize(
    ("entries", "missing"),
    [
        ([("a.bin", (tarfile.SYMTYPE, "/etc/passwd")), ("b.bin", b"B")], r"a\.bin: "),
        ([("other.bin", b"A")], r"a\.bin, b\.bin"),
    ],
)
def test_members_that_are_missing_or_no_regular_files_are_named(tmp_path, entries, missing):
    packed = archive(tmp_path / "x.tar.gz", entries)
    with pytest.raises(ValueError, match=rf"x\.tar\.gz holds no {missing}"):
        extract(packed, ["b.bin", "a.bin"], tmp_path / "out")
    assert "out/a.bin" not in files(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 2000])
def test_a_truncated_archive_is_refused_and_leaves_no_half_written_file(tmp_path, keep):
    noise = bytes(x * x % 251 for x in range(1 << 16))
    packed = archive(tmp_path / "x.tar.gz", [("a.bin", noise)])
    content = packed.read_bytes()
    assert len(content) > 200
    packed.write_bytes(content[: min(keep, len(content) - 50)])
    with pytest.raises(ValueError, match=r"x\.tar\.gz"):
        extract(packed, ["a.bin"], tmp_path / "out")
    assert files(tmp_path / "out") == []


def test_a_file_that_is_there_is_not_downloaded_again(tmp_path):
    (tmp_path / "x.gz").write_bytes(b"A")
    found = retrieve("http://host/x.gz", "7fc56270e7a70fa81a5935b72eacbe29", tmp_path)
    assert found == tmp_path / "x.gz"
