"""Opens packed traces: compressed with gzip, bzip2, xz or zstd, or in an archive (zip, tar).

Nothing is written to disk: content is streamed in bounded memory. Reading stops where a file expands too far, or asks
for much memory.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

try:
    from isal import igzip, isal_zlib

    # igzip decompresses about three times faster than zlib, but has no wheels for some machines.
    _open_gzip: Any = igzip.open
    _GZIP_ERRORS: tuple[Any, ...] = (zlib.error, isal_zlib.error)
except ImportError:  # pragma: no cover
    _open_gzip = gzip.open
    _GZIP_ERRORS = (zlib.error,)

# Errors of modules that are only imported for files that need them.
_ERRORS = (
    ("zipfile", "BadZipFile"), ("tarfile", "TarError"), ("lzma", "LZMAError"), ("zstandard", "ZstdError"),
    ("compression.zstd", "ZstdError"),
)  # fmt: skip
_ZIP_MAGIC = b"PK\x03\x04"
_TAR_BLOCK = 512
_BUFFER_BYTES = 2**18
# Highest expansion of a trace; gzip cannot exceed it.
_MAX_RATIO = 1_100
_ALWAYS_ALLOWED_BYTES = 2**30
_MAX_XZ_MEMORY_BYTES = 2**29
# The names and attributes of a member of a tar that do not fit into its header.
_MAX_LONG_HEADER_BYTES = 2**20
_MAX_MEMBERS = 2**16
# Of a member that ``in_turn`` has come to. More of it is not read before it may have to be read from its start again.
_KEPT_BYTES = 2**22
_ENDED = "it ends before its end is marked"


class UnpackError(Exception):
    """A file cannot be unpacked; the message continues the file's name with the reason."""


class Unpacked(NamedTuple):
    """The content of a file as a stream, and how many bytes of ``total`` were read so far."""

    stream: BinaryIO
    read: Callable[[], int]
    total: int
    is_packed: bool


# The member to which ``in_turn`` has come, by its path.
_here: dict[Path, Callable[[], Unpacked | None]] = {}


def unpack_errors() -> tuple[Any, ...]:
    """What reading packed content raises: it is damaged, cut off, encrypted, or packed in a way that is not known."""
    imported = [getattr(sys.modules.get(module), name, None) for module, name in _ERRORS]
    found = [error for error in imported if error is not None]
    return (*_GZIP_ERRORS, UnpackError, EOFError, RuntimeError, NotImplementedError, ValueError, OverflowError, *found)


def container_of(path: Path) -> tuple[Path, str] | None:
    """The file above a path such as ``traces.zip/rank0.json``, and the name in it; None for an ordinary path."""
    for parent in path.parents:
        if parent.is_file():
            return parent, path.relative_to(parent).as_posix()
        if parent.exists():
            break
    return None


def open_file(file: Path) -> BinaryIO:
    """The file, opened for reading.

    Raises:
        OSError: it cannot be, or is a pipe or a device: opening one may wait for ever, and its bytes come only once.
    """
    if file.exists() and not file.is_file() and not file.is_dir():
        raise OSError(errno.ESPIPE, "it is a pipe or a device, and a trace is read twice: save it to a file first")
    return file.open("rb")


def starts_with(file: Path, magic: bytes) -> bool:
    """Whether a file begins with these bytes; False if it cannot be read."""
    try:
        with open_file(file) as raw:
            return raw.read(len(magic)) == magic
    except OSError:
        return False


def bytes_of(path: Path) -> int:
    """Size of a file, or of its archive; 0 if there is none."""
    inside = container_of(path)
    try:
        return (inside[0] if inside else path).stat().st_size
    except OSError:
        return 0


def names_in(file: Path) -> tuple[list[PurePosixPath], Exception | None] | None:
    """The names of the files in an archive as far as it can be read, and the error that ended it; None for other files.

    Omits names that lead out of the archive, and anything but ordinary files.
    """
    names: list[PurePosixPath] = []
    is_archive = starts_with(file, _ZIP_MAGIC)
    try:
        with open_file(file) as raw:
            found = _names_in(raw, file.stat().st_size)
            if found is None:
                return None
            is_archive = True
            for name in found:
                if not name.is_absolute() and ".." not in name.parts:
                    names.append(name)
                if len(names) > _MAX_MEMBERS:
                    raise UnpackError(f" holds more than {_MAX_MEMBERS} files")
    except (OSError, *unpack_errors()) as error:
        return (names, error) if is_archive else None
    return names, None


def _names_in(raw: BinaryIO, size: int) -> Iterator[PurePosixPath] | None:
    if _peek(raw, len(_ZIP_MAGIC)) == _ZIP_MAGIC:
        import zipfile  # few files are archives, and the import takes milliseconds

        infos = zipfile.ZipFile(raw).infolist()
        return (PurePosixPath(info.filename) for info in infos if not info.is_dir())
    stream, is_packed = _decompressed(raw, size)
    return (name for name, _ in _in_tar(stream, is_packed=is_packed)) if _is_tar(stream) else None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Unpacked]:
    """The content of a file, or of a member of an archive, in which it must be named if there are several."""
    if path in _here and (unpacked := _here[path]()) is not None:
        yield unpacked
        return
    inside = container_of(path) if not path.exists() else None
    file, name = inside or (path, "")
    with open_file(file) as raw:
        size = file.stat().st_size
        if _peek(raw, len(_ZIP_MAGIC)) == _ZIP_MAGIC:
            import zipfile

            with zipfile.ZipFile(raw) as archive:
                infos = [info for info in archive.infolist() if not info.is_dir()]
                wanted = _named(name, [PurePosixPath(info.filename) for info in infos])
                info = next(info for info in infos if PurePosixPath(info.filename) == wanted)
                with archive.open(info) as member:
                    content = cast(BinaryIO, member)
                    yield Unpacked(_decompressed(content, info.compress_size)[0], member.tell, info.file_size, True)
            return
        stream, is_packed = _decompressed(raw, size)
        if _is_tar(stream):
            names, error = ([PurePosixPath(name)], None) if name else names_in(file) or ([], None)
            if error:
                raise error
            wanted = _named(name, names)
            for member_name, content in _in_tar(stream, is_packed=is_packed):
                if member_name == wanted:
                    yield Unpacked(_decompressed(content, size)[0], raw.tell, size, True)
                    return
            raise UnpackError(" is not in its archive")
        if name:
            raise NotADirectoryError(20, "Not a directory")
        yield Unpacked(stream, raw.tell, size, is_packed)


def is_read_from_its_start(file: Path) -> bool:
    """Whether a file is an archive in which no member can be found without reading all before: a compressed tar."""
    try:
        with open_file(file) as raw:
            stream, is_packed = _decompressed(raw, file.stat().st_size)
            return is_packed and _is_tar(stream)
    except (OSError, *unpack_errors()):
        return False


def in_turn(file: Path, names: Sequence[str]) -> Iterator[str]:
    """The names of members of a compressed tar in its order, so that it is read once; those not found come last.

    Until the next name is asked for, ``opened`` goes on from where the archive has been read to.
    """
    left = dict.fromkeys(names)
    try:
        with open_file(file) as raw:
            size = file.stat().st_size
            for name, content in _in_tar(_decompressed(raw, size)[0], is_packed=True):
                if str(name) not in left:
                    continue
                del left[str(name)]
                first = _First(content)

                def unpacked(first: _First = first) -> Unpacked | None:
                    if not first.rewind():
                        return None
                    stream = cast(BinaryIO, io.BufferedReader(first, _BUFFER_BYTES))
                    return Unpacked(_decompressed(stream, size)[0], raw.tell, size, True)

                _here[file / name] = unpacked
                yield str(name)
                _here.clear()
    except (OSError, *unpack_errors()):
        pass  # reading what is left tells why
    finally:
        _here.clear()
    yield from left


class _First(io.RawIOBase):
    """A stream that can be read from its start again while no more than ``_KEPT_BYTES`` of it were read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._kept, self._at = stream, bytearray(), 0
        self._all_kept = True

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """Stay open for the next reader."""

    def rewind(self) -> bool:
        self._at = 0
        return self._all_kept

    def readinto(self, buffer: Any) -> int:
        piece = bytes(self._kept[self._at : self._at + len(buffer)])
        if not piece:
            piece = self._stream.read(len(buffer))
            self._all_kept = self._all_kept and len(self._kept) + len(piece) <= _KEPT_BYTES
            self._kept = self._kept + piece if self._all_kept else bytearray()
        self._at = self._at + len(piece) if self._all_kept else 0
        buffer[: len(piece)] = piece
        return len(piece)


def _named(name: str, names: list[PurePosixPath]) -> PurePosixPath:
    """The member with a name, or without one the only member."""
    if name:
        if PurePosixPath(name) not in names:
            raise UnpackError(" is not in its archive")
        return PurePosixPath(name)
    if len(names) != 1:
        first = names[0] if names else ""
        raise UnpackError(f" is an archive of {len(names)} files: name one of them, as in …/{first}")
    return names[0]


# -- the members of a tar, in sequence


def _is_tar(stream: BinaryIO) -> bool:
    try:
        block = _peek(stream, _TAR_BLOCK)
    except unpack_errors() as error:
        raise UnpackError(f" cannot be decompressed: {error}") from None
    if len(block) < _TAR_BLOCK or block[:1] in b"{[ \n\r\t":
        return False
    import tarfile

    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "replace")  # verifies the block's checksum
    except tarfile.HeaderError:
        return False
    return True


def _in_tar(stream: BinaryIO, *, is_packed: bool) -> Iterator[tuple[PurePosixPath, BinaryIO]]:
    """Name and content of each ordinary file; read each before the next."""
    import tarfile

    long_headers = (
        tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
    )  # fmt: skip

    class Member(tarfile.TarInfo):
        """A header that must not request much memory."""

        @classmethod
        def frombuf(cls, buf: Any, encoding: Any, errors: Any) -> Any:
            found = super().frombuf(buf, encoding, errors)
            if found.type in long_headers and found.size > _MAX_LONG_HEADER_BYTES:
                raise UnpackError(" has a header of many megabytes in its archive")
            return found

    mode: Any = "r|" if is_packed else "r:"
    with tarfile.open(fileobj=stream, mode=mode, bufsize=_BUFFER_BYTES, tarinfo=Member) as archive:
        while (info := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # else it keeps all
            if info.isreg():
                yield PurePosixPath(info.name), cast(BinaryIO, archive.extractfile(info))


# -- compressed content


def _decompressed(raw: BinaryIO, size: int) -> tuple[BinaryIO, bool]:
    """The possibly compressed content, and whether it was; ``size`` is that of the file."""
    magic = _peek(raw, 6)
    stream: Any
    if magic.startswith(b"\x1f\x8b"):
        stream = _open_gzip(raw, "rb")
    elif magic.startswith(b"\xfd7zXZ\x00"):
        import lzma

        stream = io.BufferedReader(_Blocks(raw, lambda: lzma.LZMADecompressor(memlimit=_MAX_XZ_MEMORY_BYTES)))
    elif magic.startswith(b"BZh"):
        import bz2

        stream = io.BufferedReader(_Blocks(raw, bz2.BZ2Decompressor))
    elif magic.startswith(b"\x28\xb5\x2f\xfd"):
        stream = _open_zstd(raw)
    else:
        return raw, False
    return cast(BinaryIO, _Limited(stream, max(_ALWAYS_ALLOWED_BYTES, _MAX_RATIO * size))), True


def _open_zstd(raw: BinaryIO) -> Any:
    with contextlib.suppress(ImportError):
        from compression import zstd  # type: ignore[import-not-found]  # of Python 3.14

        return zstd.open(raw)
    try:
        import zstandard
    except ImportError:
        raise UnpackError(
            " is compressed with zstd: pip install 'overlap-callbacks[zstd]', or unpack it with zstd -d"
        ) from None
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))


class _Blocks(io.RawIOBase):
    """Decompresses with the standard library; xz and bzip2 allow several streams in one file."""

    def __init__(self, raw: BinaryIO, make: Callable[[], Any]) -> None:
        self._raw, self._make = raw, make
        self._decompressor: Any = make()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            decompressor, compressed = self._decompressor, b""
            if decompressor.eof:
                compressed = (decompressor.unused_data or self._raw.read(_BUFFER_BYTES)).lstrip(b"\0")
                if not compressed:
                    return 0
                self._decompressor = decompressor = self._make()
            elif decompressor.needs_input:
                compressed = self._raw.read(_BUFFER_BYTES)
                if not compressed:
                    raise EOFError(_ENDED)
            piece = decompressor.decompress(compressed, len(buffer))
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)


class _Limited:
    """A stream of at most ``limit`` bytes."""

    def __init__(self, stream: Any, limit: int) -> None:
        self._stream, self._left = stream, limit
        self.peek, self.close = stream.peek, stream.close

    def read(self, size: int = -1) -> bytes:
        piece: bytes = self._stream.read(size)
        self._left -= len(piece)
        if self._left < 0:
            raise UnpackError(f" expands to more than {_MAX_RATIO} times its size")
        return piece


def _peek(stream: Any, size: int) -> bytes:
    """Peek at the next bytes of a stream."""
    peeked: bytes = stream.peek(size)[:size]
    return peeked
