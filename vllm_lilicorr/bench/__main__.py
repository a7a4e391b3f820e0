"""`python -m vllm_lilicorr.bench NAME ...`: runs one benchmark of this package.

A benchmark is a module `vllm_lilicorr/bench/<name>.py` with a docstring (its first line is the help), `add_arguments(parser)` and
`main(args) -> int | None`. A new module is a new subcommand; nothing is registered here.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import sys
from pathlib import Path

from vllm_lilicorr import bench
from vllm_lilicorr.errors import UserError, nearest, run_command


def benchmarks() -> dict[str, str]:
    """Returns {name: first docstring line} of every benchmark, read without importing any (each may need packages others lack)."""
    found = {}
    for module in pkgutil.iter_modules(bench.__path__):
        if module.name.startswith("_"):
            continue
        source = Path(bench.__path__[0], f"{module.name}.py").read_text(encoding="utf-8")
        found[module.name] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status of the benchmark named by the first argument."""
    argv = sys.argv[1:] if argv is None else argv
    known = benchmarks()
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m vllm_lilicorr.bench NAME [options]    (NAME --help lists a benchmark's options)\n")
        width = max(map(len, known))
        print("\n".join(f"  {name:<{width}}  {summary}" for name, summary in known.items()))
        return 0
    name = argv[0]
    if name not in known:
        raise UserError(f"no benchmark is named {name!r}{nearest(name, list(known))}; known: {', '.join(known)}")
    module = importlib.import_module(f"vllm_lilicorr.bench.{name}")
    parser = argparse.ArgumentParser(prog=f"python -m vllm_lilicorr.bench {name}", description=known[name])
    module.add_arguments(parser)
    return module.main(parser.parse_args(argv[1:])) or 0


if __name__ == "__main__":
    run_command(main)
