"""Files and folders that are either the old ones or the new ones, never a mix."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import UserError

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def fsync_path(path: Path) -> None:
    """Flush a file or a folder entry to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _disk_errors_as_sentences(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise UserError(
            f"{target}: cannot be written ({reason}); what stood there is untouched, free space or choose another path"
        ) from error


def write_file_atomically(path: str | Path, data: str | bytes) -> None:
    """Write `data` to `path` so that any reader, and any crash, sees the old or the new content.

    A link is followed; what is no regular file (a pipe, /dev/stdout) is written to directly. Raises UserError when the
    disk refuses; the old file is then untouched.
    """
    path = Path(os.path.realpath(path))
    data = data.encode() if isinstance(data, str) else data
    with _disk_errors_as_sentences(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        fsync_path(path.parent)


def check_writable_file(path: str | Path) -> None:
    """Raise UserError now if `write_file_atomically(path)` could not succeed later: what a long command asks first."""
    text, path = str(path), Path(os.path.realpath(path))
    if not text or path.is_dir():
        raise UserError(f"'{text}': is {'a folder' if text else 'no path'} where a file is to be written; name a file")
    parent = next(folder for folder in path.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{path}: cannot be written, {parent} does not allow it; choose another path")


@contextlib.contextmanager
def write_folder_atomically(path: str | Path, may_replace: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
    """Yield an empty folder beside `path` that takes its place when the block ends without an error.

    What stands at `path` is deleted by that, so it must be an empty folder or one of which `may_replace` says that it
    holds nothing else than an earlier result.

    The contents are flushed before the switch and the switch is one rename, so a kill at any moment leaves the old
    folder or the new one. Leftovers of killed writers (hidden, beside `path`) are removed by the next writer.

    Raises UserError when the disk refuses, `path` is a file, or it holds anything else; nothing is touched then.
    """
    # A link's target is replaced, not the link; and "a/.." is what it leads to.
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: is a file where a folder is to be written; remove it or choose another path")
    if path.is_mount() or (path.exists() and any(path.iterdir()) and not may_replace(path)):
        raise UserError(
            f"{path}: holds other files than an earlier result, which writing there would delete; choose an empty or new folder"
        )
    with _disk_errors_as_sentences(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        fresh = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.{os.getpid()}."))
        try:
            os.chmod(fresh, 0o777 & ~_umask())
            yield fresh
            for folder, _, files in os.walk(fresh):
                for name in files:
                    fsync_path(Path(folder) / name)
                fsync_path(Path(folder))
            _switch(fresh, path)
            fsync_path(path.parent)
        finally:
            # After an exchange `fresh` holds the old content; after an error, the unfinished new one.
            shutil.rmtree(fresh, ignore_errors=True)


def _switch(fresh: Path, path: Path) -> None:
    """Put `fresh` at `path` in one step; an existing folder at `path` ends up at `fresh`."""
    if not path.exists():
        os.rename(fresh, path)
        return
    # rename() cannot replace a folder that is not empty; renameat2 can exchange the two without a gap.
    libc = ctypes.CDLL(None, use_errno=True)
    exchange = getattr(libc, "renameat2", None)
    if exchange is not None:
        if exchange(_AT_FDCWD, os.fsencode(fresh), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code), str(path))
    # A filesystem without exchange (some network mounts): the name is absent for the instant between two renames,
    # and both contents are whole on the disk throughout.
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.{os.getpid()}.")) / "old"
    os.rename(path, aside)
    try:
        os.rename(fresh, path)
    except OSError:
        os.rename(aside, path)
        raise
    shutil.rmtree(aside.parent, ignore_errors=True)


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.*"):
        owner = leftover.name[len(path.name) + 2 :].split(".")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and leftover.is_dir() and not (leftover / "old").exists():
            shutil.rmtree(leftover, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
