"""From what a user names to a local folder: a path, or a hub id where no such path exists."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_folder(path: str | Path, what: str, patterns: list[str] | None = None) -> Path:
    """Return the folder `path`, or the local copy of the hub repository `path` (`owner/name`) where no such path exists.

    `what` says in errors which folder is wanted; `patterns` are the files to download, by default all. The network is used
    for hub ids alone. Raises UserError when it is neither.
    """
    if not str(path):
        raise UserError(f"the path is empty; give {what}")
    folder = Path(path)
    try:
        exists, is_folder = folder.exists(), folder.is_dir()
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)[:80]}: is no usable path ({error}); give {what}") from None
    if is_folder:
        return folder
    if exists:
        raise UserError(f"{path}: is a file, not a folder; give {what}")
    if not _HUB_ID.fullmatch(str(path)):
        raise UserError(f"{path}: does not exist; give {what}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except Exception as error:  # the hub client raises a dozen unrelated kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: no such folder, and the hub does not give it ({reason}); check the name") from None
