"""The prompts that come with the package: what a drafter is shown on, none was trained on."""

from __future__ import annotations

import re

from vllm_lilicorr.chat import read_prompts
from vllm_lilicorr.files import folders

ALIKE = 0.6
"""Share of pairs of neighbouring words that two prompts have in common, from which one is the other reworded. Ours reach 0.40."""


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case, without punctuation and the layout."""
    return re.findall(r"\w+", text.lower())


def pairs(text: str) -> frozenset[tuple[str, str]]:
    found = words(text)
    return frozenset(zip(found, found[1:]))


def likeness(a: frozenset, b: frozenset) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


def turns(folder: str) -> list[str]:
    return [turn for file in sorted(folders()[folder].glob("*.jsonl")) for prompt in read_prompts(file) for turn in prompt.turns]


def test_no_prompt_of_the_demo_is_trained_on_not_even_reworded() -> None:
    shown, trained = turns("prompts"), turns("training-prompts")
    assert len(shown) > 60 and len(trained) > 1000
    assert not {" ".join(words(text)) for text in shown} & {" ".join(words(text)) for text in trained}
    # A summary's instruction is short beside its text, so that two of one text are alike whatever is asked of it.
    known = [(pairs(text), text) for text in trained]
    alike = [(a, b) for a in shown for set_b, b in known if likeness(pairs(a), set_b) > ALIKE]
    assert not alike


def test_rewording_is_noticed() -> None:
    one = "Write a Python function that checks whether a number is prime."
    assert likeness(pairs(one), pairs("Please write a Python function that checks whether a number is prime!")) > ALIKE
    assert likeness(pairs(one), pairs("Write a Python function that checks whether a list is sorted.")) < ALIKE
