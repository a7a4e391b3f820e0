"""Prompt files and chat templates: conversations in, token ids out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UserError

ROLES = ("system", "user", "assistant")


class BadPrompt(ValueError):
    """A row that holds no conversation; its text says why."""


@dataclass(frozen=True)
class Conversation:
    """A conversation to be answered: what stands before each answer.

    messages: {"role", "content"} dictionaries in order; turns: the user turns still to be asked after them, one answer
    each (a multi-turn benchmark asks them one after another, each after the target's own answer).
    """

    messages: tuple[dict[str, str], ...]
    turns: tuple[str, ...]


def parse_row(row: Any) -> Conversation:
    """Return the conversation of one decoded row: `turns`, `prompt`, or `messages` (a trailing assistant turn is dropped).

    Raises BadPrompt with the reason.
    """
    if not isinstance(row, Mapping):
        raise BadPrompt(f"must be an object, got {type(row).__name__}")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadPrompt("holds half a surrogate pair, which is no text") from None
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise BadPrompt("turns must be a non-empty list of non-empty strings")
        return Conversation((), tuple(turns))
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise BadPrompt("prompt must be a non-empty string")
        return Conversation((), (row["prompt"],))
    if "messages" not in row:
        raise BadPrompt("has none of the keys turns, prompt, messages")
    messages = row["messages"]
    if not isinstance(messages, list):
        raise BadPrompt("messages must be a list")
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise BadPrompt(f"every message needs a role ({', '.join(ROLES)}) and a string as content")
    clean = [{"role": message["role"], "content": message["content"]} for message in messages]
    while clean and clean[-1]["role"] == "assistant":
        clean.pop()
    if not clean or clean[-1]["role"] != "user" or not clean[-1]["content"].strip():
        raise BadPrompt("messages must hold a non-empty user turn to answer")
    return Conversation(tuple(clean[:-1]), (clean[-1]["content"],))


def read_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, decoded row) of a JSON Lines file; blank lines are skipped.

    Raises UserError naming file and line when the file is missing or a line is not JSON.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield number, json.loads(line.rstrip())
                    except json.JSONDecodeError as error:
                        where = f"{path}, line {number}, column {error.colno}"
                        raise UserError(f"{where}: is not JSON ({error.msg}); mend or remove the line") from None
                    except (ValueError, RecursionError) as error:  # numbers or nesting beyond Python's limits
                        raise UserError(f"{path}, line {number}: is not usable JSON ({error}); mend or remove it") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; give a JSON Lines file") from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({getattr(error, 'strerror', error)}); give a JSON Lines file of prompts"
        ) from None


def read_prompts(path: str | Path, limit: int | None = None) -> list[Conversation]:
    """Return the first `limit` conversations of a JSON Lines file; raises UserError naming file and line on a bad one."""
    conversations: list[Conversation] = []
    for number, row in itertools.islice(read_rows(path), limit):
        try:
            conversations.append(parse_row(row))
        except BadPrompt as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    if not conversations:
        raise UserError(f"{path}: holds no prompt")
    return conversations


def render(tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
    """Return the token ids of `messages` under the tokenizer's chat template, reasoning disabled where it can be.

    Raises UserError when the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{tokenizer.name_or_path}: its tokenizer has no chat template; use an instruct model or add chat_template.jinja"
        )
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False, enable_thinking=False
        )
    except Exception as error:  # a template is a program of its own and raises what it likes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{tokenizer.name_or_path}: its chat template refuses the conversation ({reason}); mend the template or the prompt"
        ) from None
    return [int(i) for i in ids]
