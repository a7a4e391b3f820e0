"""Errors a user can cause, and how a command shows them."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn


class UserError(Exception):
    """One sentence: what is wrong, where (file, field), what was expected, how to mend it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Exit with `main`'s status; a `UserError` becomes one sentence on stderr and status 1, Ctrl-C status 130."""
    try:
        status = main()
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        # The reader of our output (head, less) went away; that is no error of ours.
        _drop_stdout()
        status = 0
    except OSError as error:
        _drop_stdout()
        print(f"error: the output cannot be written ({error.strerror or error}); free space or redirect it", file=sys.stderr)
        status = 1
    sys.exit(status)


def _drop_stdout() -> None:
    """Leave Python nothing that it could fail to flush at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
