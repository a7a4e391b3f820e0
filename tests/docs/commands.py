"""The commands in the documentation: how they are found, and how each is checked without being run.

A command stands in a fenced block (`console`: lines after `$ `; `sh`: every line), in an unlabelled or indented block, or in
inline code, where it begins with a program known here. What cannot run where tests run says so behind it: `# needs a GPU`,
`# needs the network`, `# needs a GPU and the network`. Being marked excuses a command from running, never from parsing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

from packaging.requirements import InvalidRequirement, Requirement

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])

MARK = re.compile(r"needs (a GPU and the network|a GPU|the network)")
FENCE = re.compile(r"^\s*(```+|~~~+)\s*([\w-]*)\s*$")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
OPTIONAL = re.compile(r"\[(--[^]]*)\]")
"""An option in brackets, as usage lines write it."""
SEPARATORS = {"&&", "||", "|", "&", ";"}


class Wrong(Exception):
    """Why a documented command would not work."""


@dataclass(frozen=True)
class Command:
    """One command as a page shows it. inline: it stands in a sentence, where `...` and placeholders are usual."""

    page: str
    line: int
    text: str
    inline: bool = False

    @property
    def mark(self) -> str | None:
        """What the command needs beyond a machine that runs tests, or None."""
        found = MARK.search(_cut_comment(self.text)[1])
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Fence:
    """A fenced block: its language, its first line's number and its lines."""

    language: str
    line: int
    lines: tuple[str, ...]


def blocks(text: str) -> tuple[list[Fence], list[tuple[int, str]]]:
    """Return a page's fenced blocks, and its other lines with their numbers."""
    fences, prose, inside = [], [], None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if inside is None and fence:
            inside = (fence[1], fence[2], number + 1, [])
        elif inside is not None and line.strip() == inside[0]:
            fences.append(Fence(inside[1], inside[2], tuple(inside[3])))
            inside = None
        elif inside is not None:
            inside[3].append(line)
        else:
            prose.append((number, line))
    if inside is not None:
        raise Wrong(f"the block that begins before line {inside[2]} is never closed")
    return fences, prose


def commands(page: Path) -> list[Command]:
    """Return a page's commands in order."""
    name = page.relative_to(ROOT).as_posix()
    fences, prose = blocks(page.read_text(encoding="utf-8"))
    found = []
    for fence in fences:
        if fence.language == "console":
            found += [Command(name, line, text) for line, text in _prompted(fence)]
        elif fence.language in ("sh", "bash", "shell"):
            lines = _joined(enumerate(fence.lines, start=fence.line))
            found += [Command(name, line, text) for line, text in lines if text and not text.startswith("#")]
        elif not fence.language:
            lines = enumerate(fence.lines, start=fence.line)
            found += [Command(name, line, _bare(text)) for line, text in lines if _begins_with_program(text)]
    for number, line in prose:
        if line.startswith("    ") and _begins_with_program(line):
            found.append(Command(name, number, _bare(line)))
        found += [Command(name, number, span, inline=True) for span in INLINE.findall(line) if _is_inline_command(span)]
    return sorted(found, key=lambda command: command.line)


def all_commands() -> list[Command]:
    """Return the commands of all pages."""
    return [command for page in PAGES for command in commands(page)]


def console(page: Path, language: str = "console") -> Iterator[list[str]]:
    """Yield, for each fenced block of that language, its commands (console) or its one program (python)."""
    for fence in blocks(page.read_text(encoding="utf-8"))[0]:
        if fence.language == language:
            yield [text for _, text in _prompted(fence)] if language == "console" else ["\n".join(fence.lines)]


def _prompted(fence: Fence) -> list[tuple[int, str]]:
    """Return the commands of a console block; a line without `$ ` is output, or continues a command that ends in `\\`."""
    lines, going_on = [], False
    for number, line in enumerate(fence.lines, start=fence.line):
        if line.startswith("$ ") or going_on:
            lines.append((number, line.removeprefix("$ ") if not going_on else line))
            going_on = line.endswith("\\")
    return _joined(lines)


def _joined(lines: Iterator[tuple[int, str]] | list[tuple[int, str]]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    going_on = False
    for number, line in lines:
        text = line.strip().removesuffix("\\").strip()
        if going_on:
            found[-1] = (found[-1][0], f"{found[-1][1]} {text}")
        else:
            found.append((number, text))
        going_on = line.rstrip().endswith("\\")
    return found


def _bare(line: str) -> str:
    """Return the command of an unlabelled line: an explanation may stand behind two or more blanks."""
    return re.split(r" {2,}(?![ #])", line.strip().removeprefix("$ "))[0]


def _begins_with_program(line: str) -> bool:
    try:
        words = simple_commands(_bare(line))
    except Wrong:
        return False
    return bool(words) and _program(words[0]) in PROGRAMS and len(words[0]) > 1


def _is_inline_command(span: str) -> bool:
    return _begins_with_program(span) and "\N{HORIZONTAL ELLIPSIS}" not in span


def _cut_comment(text: str) -> tuple[str, str]:
    """Return a line's command and its comment: what follows a `#` that begins a word outside quotes."""
    quote = ""
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#" and (at == 0 or text[at - 1].isspace()):
            return text[:at].rstrip(), text[at:]
    return text, ""


def _without_substitutions(text: str) -> str:
    return SUBSTITUTION.sub("SUBSTITUTED", text)


def simple_commands(text: str) -> list[list[str]]:
    """Return the words of each simple command in a line: comments, assignments in front, pinning and redirections dropped."""
    line = OPTIONAL.sub(r"\1", _without_substitutions(_cut_comment(text)[0]))
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    found: list[list[str]] = [[]]
    try:
        words = list(lexer)
    except ValueError as error:
        raise Wrong(f"the shell cannot read it ({error})") from None
    for word in words:
        if word in SEPARATORS:
            found.append([])
        else:
            found[-1].append(word)
    return [stripped for words in found if (stripped := _stripped(words))]


def _stripped(words: list[str]) -> list[str]:
    while words and ASSIGNMENT.match(words[0]):
        words = words[1:]
    if words[:2] == ["taskset", "-c"]:
        words = words[3:]
    if ">" in words:
        words = words[: words.index(">")]
    return words


def _program(words: list[str]) -> str:
    name = words[0].removeprefix(".venv/bin/")
    return "python" if re.fullmatch(r"python3?(\.\d+)?", name) else name


def check(command: Command) -> list[str]:
    """Return the programs a command runs, as the tests' `RUN_BY` names them; raises Wrong if one would not start."""
    programs = []
    for inner in SUBSTITUTION.findall(_cut_comment(command.text)[0]):
        programs += check(Command(command.page, command.line, inner, command.inline))
    for words in simple_commands(command.text):
        program = _program(words)
        if program not in PROGRAMS:
            raise Wrong(f"'{program}' is no program that the documentation's tests know; add it to tests/docs/commands.py")
        # A program named in a sentence need not be given everything it requires.
        mentioned = command.inline and not any(word.startswith("-") and word != "-m" for word in words)
        programs += PROGRAMS[program](words[1:], mentioned or "..." in words)
    return programs


def _python(words: list[str], open_ended: bool) -> list[str]:
    if not words:
        raise Wrong("python alone does nothing")
    if words[0] == "-m":
        if len(words) < 2:
            raise Wrong("-m needs a module")
        return _module(words[1], words[2:], open_ended)
    return _script(words[0], words[1:], open_ended)


def _script(path: str, words: list[str], open_ended: bool) -> list[str]:
    if not (ROOT / path).is_file():
        raise Wrong(f"there is no {path}")
    if path.startswith(("trainer/", "kernels/")):
        parse(f"vllm_lilicorr.{path.removesuffix('.py').replace('/', '.')}", words, open_ended)
        if path == "trainer/main.py" and not open_ended:
            _resolve(words)
    return [f"python {path}"]


def _module(name: str, words: list[str], open_ended: bool) -> list[str]:
    package, _, rest = name.partition(".")
    if package != "vllm_lilicorr":
        spec = importlib.util.find_spec(package)
        # Looked up as a file: importing DeepSpeed to find a module in it would take seconds.
        places = [Path(place, *rest.split(".")) for place in (spec.submodule_search_locations or []) if rest] if spec else []
        if spec is None or rest and not any(place.is_dir() or place.with_suffix(".py").is_file() for place in places):
            raise Wrong(f"there is no module {name}")
        return [f"python -m {name}"]
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise Wrong(f"there is no module {name}")
    if spec.submodule_search_locations is not None:
        sub = [] if not words or words[0].startswith("-") else words[:1]
        parse(f"{name}.__main__", words, open_ended)
        return [" ".join(["python -m", name, *sub])]
    parse(name, words, open_ended)
    return [f"python -m {name}"]


class _Parsed(Exception):
    pass


def parse(module: str, words: list[str], open_ended: bool) -> None:
    """Let the module's own parser read `words`, and stop there. Raises Wrong with what the parser says."""
    if open_ended:
        return
    original = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *arguments: object, **named: object) -> None:
        original(parser, *arguments, **named)  # type: ignore[call-overload]
        raise _Parsed

    main = importlib.import_module(module).main
    arguments = [words] if main.__code__.co_argcount else []
    said = io.StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(sys, "argv", [module, *words]),
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            main(*arguments)
        except _Parsed:
            return
        except SystemExit as error:
            if error.code:
                raise Wrong((said.getvalue().strip().splitlines() or ["its parser refuses it"])[-1]) from None
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {error}") from None


def _resolve(words: list[str]) -> None:
    """Let the trainer resolve the configuration with its overrides, where the file is one of ours."""
    from vllm_lilicorr.trainer.main import main

    file = words[words.index("--config") + 1] if "--config" in words[:-1] else ""
    if (ROOT / file).is_file():
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()):
            try:
                main([*words, "--print-config"])
            except Exception as error:
                raise Wrong(f"{type(error).__name__}: {error}") from None


def _deepspeed(words: list[str], open_ended: bool) -> list[str]:
    with_value = {"--num_gpus", "--num_nodes", "--hostfile", "--include", "--exclude", "--master_port"}
    while words and words[0].startswith("-"):
        if words[0] not in with_value:
            raise Wrong(f"{words[0]} is no option of the launcher that the documentation's tests know")
        words = words[2:]
    if not words:
        raise Wrong("the launcher needs a script")
    return ["deepspeed", *_script(words[0], words[1:], open_ended)]


@cache
def makefile() -> tuple[frozenset[str], frozenset[str]]:
    """Return the Makefile's targets and its variables."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^([\w-]+):", text, re.MULTILINE)), frozenset(re.findall(r"^(\w+) \?=", text, re.MULTILINE))


def _make(words: list[str], open_ended: bool) -> list[str]:
    targets, variables = makefile()
    named = [word for word in words if not ASSIGNMENT.match(word)]
    for word in words:
        known, what = (variables, "variable") if ASSIGNMENT.match(word) else (targets, "target")
        if word.partition("=")[0] not in known:
            raise Wrong(f"the Makefile has no {what} {word.partition('=')[0]}")
    return [f"make {target}" for target in named]


@cache
def extras() -> frozenset[str]:
    """Return the extras that setup.py offers."""
    (call,) = (node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Call)
               and isinstance(node.func, ast.Name) and node.func.id == "setup")
    (table,) = (keyword.value for keyword in call.keywords if keyword.arg == "extras_require")
    assert isinstance(table, ast.Dict)
    return frozenset(key.value for key in table.keys if isinstance(key, ast.Constant))


def _pip(words: list[str], open_ended: bool) -> list[str]:
    if not words or words[0] not in ("install", "uninstall", "download", "freeze"):
        raise Wrong(f"pip has no command {words[:1]}, or none that the documentation's tests know")
    for word in words[1:]:
        if word.startswith("-"):
            continue
        try:
            requirement = Requirement(re.sub(r"^\.(?=\[|$)", "vllm-lilicorr", word))
        except InvalidRequirement:
            raise Wrong(f"'{word}' is no requirement") from None
        if requirement.name == "vllm-lilicorr" and not requirement.extras <= extras():
            raise Wrong(f"there is no extra {', '.join(sorted(requirement.extras - extras()))}")
    return [f"pip {words[0]}"]


def _pytest(words: list[str], open_ended: bool) -> list[str]:
    for word in words:
        if word.startswith("tests/") and not node_exists(word):
            raise Wrong(f"there is no {word}")
    return ["pytest"]


def node_exists(node: str) -> bool:
    """Return whether `tests/FILE.py[::FUNCTION]` is there."""
    file, _, function = node.partition("::")
    path = ROOT / file
    if not function:
        return path.exists()
    return path.is_file() and any(
        isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and found.name == function
        for found in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def _vllm(words: list[str], open_ended: bool) -> list[str]:
    if not words or words[0] not in ("serve", "bench"):
        raise Wrong("of vllm's commands the documentation's tests know serve and bench")
    return [" ".join(["vllm", *words[: 1 if words[0] == "serve" else 2]])]


def _sbatch(words: list[str], open_ended: bool) -> list[str]:
    programs = []
    for word, following in zip(words, [*words[1:], ""]):
        if word == "--wrap":
            programs += check(Command("--wrap", 0, following))
    if not programs:
        raise Wrong("sbatch without --wrap runs nothing that the documentation's tests can see")
    return ["sbatch", *programs]


def _hf(words: list[str], open_ended: bool) -> list[str]:
    if words[:1] != ["download"]:
        raise Wrong("of hf's commands the documentation's tests know download")
    return ["hf download"]


def _shell(words: list[str], open_ended: bool) -> list[str]:
    return []


PROGRAMS: dict[str, Callable[[list[str], bool], list[str]]] = {
    "python": _python,
    "deepspeed": _deepspeed,
    "make": _make,
    "pip": _pip,
    "pytest": _pytest,
    "vllm": _vllm,
    "sbatch": _sbatch,
    "hf": _hf,
    **dict.fromkeys(("cp", "cd", "cat", "echo", "curl", "grep"), _shell),
}
"""What each program does with its words: returns the programs that run, raises Wrong."""
