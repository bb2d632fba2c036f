"""Traces that are compressed or in an archive: read in bounded memory, and nothing leads out of an archive."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from overlap_callbacks.traces import TraceError, analyze_files, archives, compare_files, find_traces, read_trace
from tests import kineto
from tests.traces.events import all_reduce, error_of, gemm, said


def of_rank(rank: int) -> bytes:
    events = [gemm(0, 5), all_reduce(1, 2 + rank), kineto.step(1, 0, 1000)]
    return kineto.text(events, **kineto.job(rank, 4))


def zstd(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(content)  # type: ignore[no-any-return]


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip


def tar_of(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, inside in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(inside)
            archive.addfile(info, io.BytesIO(inside))
    return content.getvalue()


def ranks_in(packed: str) -> dict[str, bytes]:
    """Three ranks; the one in the middle has its own form."""
    files = {f"./run/rank{rank}.json": of_rank(rank) for rank in (10, 2, 1)}
    files[f"./run/rank2.json{packed}"] = PACKERS[packed](files.pop("./run/rank2.json"))
    return {**files, "./run/notes.txt": b"not a trace", "./run/.hidden.json": b"not a trace"}


@pytest.mark.parametrize("packed", PACKERS)
def test_a_compressed_trace_gives_the_figures_of_the_plain_one(tmp_path: Path, packed: str) -> None:
    path = tmp_path / f"rank3.json{packed}"
    path.write_bytes(PACKERS[packed](of_rank(3)))
    (tmp_path / "plain").write_bytes(of_rank(3))
    (found,), (expected,) = (analyze_files(find_traces([file])).traces for file in (tmp_path, tmp_path / "plain"))
    assert found.total == expected.total
    assert found.total.compute_ms == 5
    assert found.rank == 3
    path.rename(tmp_path / "any name")  # what counts is the content
    assert analyze_files([tmp_path / "any name"]).traces[0].total == found.total


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("inside", ["", ".gz", ".xz"])
def test_an_archive_stands_for_the_traces_in_it(tmp_path: Path, packed: str, inside: str) -> None:
    path = tmp_path / f"run.tar{packed}"
    path.write_bytes(PACKERS[packed](tar_of(ranks_in(inside))))
    files = find_traces([tmp_path])
    names = ["rank1.json", f"rank2.json{inside}", "rank10.json"]
    assert files == [path / "run" / name for name in names]
    found = analyze_files(files)
    assert [trace.rank for trace in found.traces] == [1, 2, 10]
    assert [trace.total.compute_ms for trace in found.traces] == [5, 5, 5]
    assert not said(found.problems, "left out")
    with pytest.raises(TraceError, match="archive of 5 files: name one of them"):
        read_trace(path)
    with pytest.raises(TraceError, match="is not in its archive"):
        read_trace(path / "none.json")


def test_the_only_file_of_an_archive_needs_no_name(tmp_path: Path) -> None:
    path = tmp_path / "run.tgz"
    path.write_bytes(gzip.compress(tar_of({"rank1.json": of_rank(1)})))
    assert read_trace(path).rank == 1


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz"])
def test_a_compressed_file_that_is_cut_off_gives_what_is_there(tmp_path: Path, packed: str) -> None:
    path = tmp_path / f"a.json{packed}"
    whole = PACKERS[packed](kineto.text([gemm(i, i + 0.5) for i in range(30_000)]))
    path.write_bytes(whole[: len(whole) // 2])
    trace = read_trace(path)
    assert said(trace.problems, "cut off or damaged after")
    path.write_bytes(whole[:20])
    with pytest.raises(TraceError, match="cannot be decompressed"):
        read_trace(path)


def test_an_archive_that_is_cut_off_gives_the_traces_before_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.tar"
    path.write_bytes(tar_of({f"rank{rank}.json": of_rank(rank) for rank in range(3)})[: 2**12])
    found = analyze_files(find_traces([path]))
    assert 1 <= len(found.traces) < 3
    assert said(found.problems, "left out", "run.tar cannot be read from its archive")


@pytest.mark.parametrize("name", ["/etc/rank1.json", "../rank1.json", "run/../../rank1.json"])
def test_nothing_leads_out_of_an_archive(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "rank1.json").write_bytes(of_rank(1))
    path = folder / "run.tar"
    path.write_bytes(tar_of({name: of_rank(9), "rank2.json": of_rank(2)}))
    assert find_traces([path]) == [path / "rank2.json"]
    zipped = folder / "run.zip"
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr(name, of_rank(9))
        archive.writestr("rank2.json", of_rank(2))
    assert find_traces([zipped]) == [zipped / "rank2.json"]


def test_links_in_an_archive_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_bytes(of_rank(9))
    path, content = tmp_path / "run.tar", io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo(f"rank{kind!r}.json")
            link.type, link.linkname = kind, str(tmp_path / "secret.json")
            archive.addfile(link)
        archive.addfile(tarfile.TarInfo("notes.txt"))
    path.write_bytes(content.getvalue())
    assert "is an archive without traces" in error_of("analyze", str(path))


def test_a_file_that_expands_beyond_measure_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_ALWAYS_ALLOWED_BYTES", 2**20)
    monkeypatch.setattr(archives, "_MAX_RATIO", 100)
    blank = kineto.text([gemm(0, 5), all_reduce(1, 2)]) + b" " * 2**25
    path = tmp_path / "a.json.xz"
    path.write_bytes(lzma.compress(blank))
    assert said(read_trace(path).problems, "expands to more than 100 times its size")
    path = tmp_path / "a.tar.xz"
    path.write_bytes(lzma.compress(tar_of({"zeros.bin": bytes(2**25), "rank1.json": of_rank(1)})))
    assert "expands to more than 100 times its size" in error_of("analyze", str(path))


def test_a_header_of_an_archive_may_not_fill_the_memory(tmp_path: Path) -> None:
    path, content = tmp_path / "a.tar", io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("x" * 2**21))
    path.write_bytes(content.getvalue())
    assert "header of many megabytes" in error_of("analyze", str(path))


def test_a_decompressor_may_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.json.xz"
    header = b"\xfd7zXZ\x00\x00\x04\xe6\xd6\xb4F"
    block = bytes([2, 0, 0x21, 1, 36, 0, 0, 0])  # its dictionary has a gigabyte
    path.write_bytes(header + block + zlib.crc32(block).to_bytes(4, "little") + bytes(64))
    assert "cannot be decompressed: Memory usage limit exceeded" in error_of("analyze", str(path))


def test_without_its_library_zstd_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    path = tmp_path / "a.json.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(1000))
    assert "pip install 'overlap-callbacks[zstd]'" in error_of("analyze", str(path))
    path.write_bytes(gzip.compress(of_rank(1)))  # and nothing else is lost
    assert read_trace(path).rank == 1


def test_a_packed_database_is_to_be_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite.gz"
    path.write_bytes(gzip.compress(b"SQLite format 3\0" + bytes(1000)))
    assert "a compressed or archived database: unpack it" in error_of("analyze", str(path))


def test_one_trace_of_an_archive_is_compared_with_another(tmp_path: Path) -> None:
    path = tmp_path / "run.tar.xz"
    path.write_bytes(lzma.compress(tar_of({f"rank{rank}.json": of_rank(rank) for rank in range(2)})))
    found = compare_files(path / "rank0.json", path / "rank1.json")
    assert msgspec.to_builtins(found)["matched_fraction"] == 1


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of archives."""
    made, in_tar = [], archives._in_tar
    monkeypatch.setattr(
        archives, "_in_tar", lambda stream, *, is_packed: made.append(is_packed) or in_tar(stream, is_packed=is_packed)
    )
    return made


def old(rank: int) -> bytes:
    """Times since 1970, which a first look at the file finds too late for floating-point numbers."""
    events = [gemm(0, 5), all_reduce(1, 2 + rank), kineto.step(1, 0, 1000)]
    for event in events:
        event["ts"] = kineto.Nanoseconds(event["ts"] + 1_690_000_000 * 10**9 + 434)
    return kineto.text(events, **kineto.job(rank, 12))


@pytest.mark.parametrize("packed", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("make", [of_rank, old])
@pytest.mark.parametrize("inside", ["", ".gz"])
def test_a_compressed_archive_is_read_once(
    tmp_path: Path, openings: list[bool], packed: str, make: Callable[[int], bytes], inside: str
) -> None:
    ranks = (7, 3, 11, 0, 2)
    path = tmp_path / f"run.tar{packed}"
    path.write_bytes(
        PACKERS[packed](tar_of({f"rank{rank}.json{inside}": PACKERS[inside](make(rank)) for rank in ranks}))
    )
    files = find_traces([path])
    openings.clear()
    found = analyze_files(files)
    assert openings == [True]
    assert [trace.rank for trace in found.traces] == sorted(ranks)
    assert [trace.total.comm_ms for trace in found.traces] == [1 + rank for rank in sorted(ranks)]
    assert not said(found.problems, "left out")


def test_a_compressed_archive_is_read_once_by_each_process(tmp_path: Path) -> None:
    path = tmp_path / "run.tar.gz"
    path.write_bytes(gzip.compress(tar_of({f"rank{rank}.json": of_rank(rank) for rank in (3, 1, 0, 2)})))
    whole = analyze_files(find_traces([path]))
    assert analyze_files(find_traces([path]), processes=2) == whole
    assert [trace.rank for trace in whole.traces] == [0, 1, 2, 3]


def test_what_an_archive_lacks_or_is_given_twice_loses_nothing(tmp_path: Path, openings: list[bool]) -> None:
    path = tmp_path / "run.tar.gz"
    files = {f"rank{rank}.json": of_rank(rank) for rank in range(3)}
    path.write_bytes(gzip.compress(tar_of({**files, "rank1.json": b"no trace"})))
    wanted = [path / name for name in ("rank2.json", "none.json", "rank0.json", "rank1.json", "rank2.json")]
    found = analyze_files(wanted)
    assert sorted(trace.rank or 0 for trace in found.traces) == [0, 2, 2]
    assert [problem for problem in found.problems if "left out" in problem] == [
        f"left out: {path}/none.json is not in its archive [OC701]", f"left out: {path}/rank1.json is no trace of "
        "torch.profiler: it has no traceEvents [OC701]",
    ]  # fmt: skip
    assert len(openings) == 2  # the second to see that the one is not there


def test_a_member_that_is_long_is_read_again_from_the_start_of_its_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openings: list[bool]
) -> None:
    monkeypatch.setattr(archives, "_KEPT_BYTES", 100)
    path = tmp_path / "run.tar.gz"
    path.write_bytes(gzip.compress(tar_of({f"rank{rank}.json": old(rank) for rank in (1, 0)})))
    found = analyze_files([path / f"rank{rank}.json" for rank in range(2)])
    assert [(trace.rank, trace.total.compute_ms) for trace in found.traces] == [(0, 5), (1, 5)]
    assert len(openings) == 3


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz", ".zst"])
def test_a_packed_file_that_is_cut_off_early_is_not_said_to_be_empty(tmp_path: Path, packed: str) -> None:
    content = PACKERS[packed](kineto.text(kineto.training(operators=0)))
    path = tmp_path / f"a.json{packed}"
    path.write_bytes(content[: len(content) * 9 // 10])
    assert any(words in error_of("analyze", str(path)) for words in ("cut off before", "cannot be decompressed"))
