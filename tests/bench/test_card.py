"""The model card holds what the run's files say, and is written of no other drafter."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from vllm_lilicorr.bench import card
from vllm_lilicorr.bench.__main__ import main as bench
from vllm_lilicorr.bench._results import Results, checkpoint_digest
from vllm_lilicorr.bench._tables import MISSING
from vllm_lilicorr.errors import UserError
from vllm_lilicorr.trainer.corpus import Conversation, Origin, write_meta, write_shard

MADE_BY = "PROMPTS=prompts trainer/recipes/smollm2-135m.sh"


def cells(text: str, first: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return line.strip("| ").split(" | ")


def write_run(folder: Path, corpus: Path, steps: int, **terms: float) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"data:\n  path: {corpus}\nrun:\n  seed: 0\n# hash: f00d\n")
    # Each step takes 3.6 s and its terms are its number times what is given.
    rows = [{"step": i + 1, "seconds": 3.6, **{term: (i + 1) * value for term, value in terms.items()}} for i in range(steps)]
    rows.insert(steps // 2, {"step": steps // 2, "evaluation_seconds": 36.0, "tau_argmax": 1.25, "accepted_argmax": 1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def made(tiny, tmp_path) -> list[str]:
    """Return the command's words over a copied checkpoint, made-up runs and a made-up result file."""
    checkpoint = shutil.copytree(tiny.lilicorr, tmp_path / "smollm2-135m")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_meta(corpus, Origin("tiny", "0", "0"), {"temperature": 0.0, "max_tokens": 99}, "prompts", 1)
    write_shard(corpus, 0, 1, [Conversation((row, 0), np.arange(9), ((2, 9),), ("stop",)) for row in range(1500)], Counter())
    run = write_run(tmp_path / "lilicorr", corpus, 20, loss=0.5, dflash=0.25, ce=0.125)
    other = write_run(tmp_path / "dflash", corpus, 4, loss=1.0, dflash=1.0)
    results = Results(tmp_path / "out", ["python", "-m", "vllm_lilicorr.bench", "acceptance", "--output", "out"])
    rules = {"greedy": [[1, 1, 2], [0, 2, 0]], "argmax": [[2, 2, 0], [2, 0, 0]], "coverage": [[0, 0, 4], [0, 0, 2]]}
    settings = {"target": "tiny", "checkpoint": checkpoint_digest(checkpoint)}
    results.put("acceptance/T0/gsm8k/lilicorr", settings, {"answered": 2, "prompts": 2, "tokens": 10, "rules": rules})
    words = ["card", str(checkpoint), "--run", str(run), "--beside", str(other), "--results", str(tmp_path / "out")]
    return [*words, "--made-by", MADE_BY, "--num-speculative-tokens", "3", "--note", "Three were fastest."]


def test_the_card_tells_how_the_drafter_was_made_and_what_it_reaches(made, tmp_path):
    assert bench(made) == 0
    text = (tmp_path / "smollm2-135m/README.md").read_text()
    parts = ("# LiLiCorr drafter", "candidate_topk", "## Training", "## Acceptance length", "Three were fastest", "## Serve")
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
    assert f"```\n{MADE_BY}\n```" in text
    assert "20 steps in 0.03 hours" in text  # 20 * 3.6 s and an evaluation of 36 s
    assert "1,500 prompts answered by the target itself (temperature 0, at most 99 tokens a turn), 10,500 answer tokens" in text
    # Twenty steps in eight rows of two or three: the mean of steps 1 and 2 is 1.5. The evaluation came after step 10.
    curve, _, rest = text.partition("Learning curve of `dflash`")
    assert cells(curve, "Steps") == ["Steps", "Hours", "loss", "L_DFlash", "L_CE"]
    assert cells(curve, "1-2") == ["1-2", "0.00", "0.750", "0.375", "0.188"]
    assert cells(curve, "19-20")[:3] == ["19-20", "0.03", "9.750"]
    assert cells(rest.partition("Acceptance")[0], "Steps") == ["Steps", "Hours", "loss", "L_DFlash"]
    assert cells(text, "lilicorr | 10") == ["lilicorr", "10", "1.250"]
    assert cells(text, "Benchmark") == ["Benchmark", "lilicorr, greedy", "lilicorr, argmax", "lilicorr, coverage"]
    assert cells(text, "GSM8K")[1].startswith("2.17 (") and cells(text, "GSM8K")[3].startswith("3.00 (")
    assert "`python -m vllm_lilicorr.bench acceptance --output out`" in text
    assert "hash: f00d" in text and "asks for 3 of the 4 tokens" in text


def test_a_run_that_went_on_from_anothers_weights_is_told_with_it(made, tmp_path):
    more = write_run(tmp_path / "more", tmp_path / "corpus", 10, loss=0.1, dflash=0.1)
    config = more / "config.yaml"
    config.write_text(config.read_text().replace("run:\n", f"run:\n  warm_start: {tmp_path / 'lilicorr/export'}\n"))
    assert bench([*made, "--run", str(more)]) == 0
    text = (tmp_path / "smollm2-135m/README.md").read_text()
    assert "30 steps in 0.05 hours, evaluation included, as `lilicorr` and then `more` of that command" in text
    curve = text.partition("Learning curve of `more`")[2].partition("Learning curve of `dflash`")[0]
    # Step 30 is the second run's tenth; the row's mean is over its steps 7 to 10.
    assert cells(curve, "27-30")[:3] == ["27-30", "0.05", "0.850"]
    assert cells(text, "more | 10") == ["more", "10", "1.250"] and cells(text, "more | 25") == ["more", "25", "1.250"]

    shutil.rmtree(tmp_path / "lilicorr")  # of a checkpoint from elsewhere nothing is known
    assert bench([*made, "--run", str(more)]) == 0
    alone = (tmp_path / "smollm2-135m/README.md").read_text()
    assert "10 steps in 0.02 hours, evaluation included, as `more` of" in alone
    assert f"`more` began with the weights of `{tmp_path / 'lilicorr/export'}`: its backbone" in alone and "began" not in text


def test_a_tolerated_step_is_left_out_of_its_rows_mean():
    records = [{"step": step, "seconds": 1.0, "loss": step * 1.0, "dflash": None} for step in range(1, 17)]
    records[0]["loss"] = None
    assert cells(card.curve(records), "1-2") == ["1-2", "0.00", "2.000", MISSING]


def test_its_serving_file_is_read_from_its_own_folder(made, tmp_path):
    bench(made)
    assert json.loads((tmp_path / "smollm2-135m/lilicorr.json").read_text()) == {"model": ".", "num_speculative_tokens": 3}
    from vllm_lilicorr.serving import configuration

    found = configuration.read(str(tmp_path / "smollm2-135m/lilicorr.json"))
    assert found["model"] == str(tmp_path / "smollm2-135m")


def test_what_does_not_belong_together_is_refused(made, tmp_path):
    with pytest.raises(UserError, match=r"must lie in 1\.\.4, the drafter's slots; got 5"):
        bench([*made, "--num-speculative-tokens", "5"])
    with pytest.raises(UserError, match="metrics.jsonl: cannot be read"):
        (tmp_path / "dflash/metrics.jsonl").rename(tmp_path / "elsewhere")
        bench(made)
    config = tmp_path / "smollm2-135m/config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(UserError, match="holds no acceptance of the drafter in"):
        bench(made)
    assert not (tmp_path / "smollm2-135m/lilicorr.json").exists()


def test_a_run_without_steps_is_said(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tau_argmax": 1.0}\n')
    with pytest.raises(UserError, match="holds no training step"):
        card.read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1,')
    with pytest.raises(UserError, match="is not JSON Lines"):
        card.read_metrics(tmp_path)


@pytest.mark.parametrize(("threshold_rate", "asked"), [(120.0, (2, None)), (150.0, (4, 0.1))])
def test_the_fastest_length_and_threshold_are_taken_from_what_was_served(made, tmp_path, threshold_rate, asked):
    digest = checkpoint_digest(tmp_path / "smollm2-135m")
    served = Results(tmp_path / "lengths", ["python", "-m", "vllm_lilicorr.bench", "serve", "--output", "lengths"])
    # Tokens a second: 100 without drafts. Two tokens a block gain most; another drafter, and a busier server, say otherwise.
    rates = {("n2", 1, digest, 2, 0): 140.0, ("n4", 1, digest, 4, 0): 130.0, ("other", 1, "f00d", 3, 0): 190.0}
    rates |= {("n4", 8, digest, 4, 0): 180.0, ("t", 1, digest, 4, 0.1): threshold_rate}
    plain = {"tokens_per_second": 100.0, "drafts": 0, "accepted": 0}
    for concurrency in (1, 8):
        served.put(f"serve/serve/T0/gsm8k/c{concurrency}/none/round0", {"system": {"draft": None}}, plain)
    for (name, concurrency, checkpoint, length, threshold), rate in rates.items():
        settings = {"system": {"draft": name, "checkpoint": checkpoint, "num_speculative_tokens": length}}
        settings["system"] |= {"confidence_threshold": threshold} if threshold else {}
        result = {"tokens_per_second": rate, "drafts": 10, "accepted": 5 * length}
        served.put(f"serve/serve/T0/gsm8k/c{concurrency}/{name}/round0", settings, result)
    at = made.index("--num-speculative-tokens")
    bench([*made[:at], *made[at + 2 :], "--lengths", str(tmp_path / "lengths")])
    text = (tmp_path / "smollm2-135m/README.md").read_text()
    found = json.loads((tmp_path / "smollm2-135m/lilicorr.json").read_text())
    assert (found["num_speculative_tokens"], found.get("confidence_threshold")) == asked
    rows = ("| 2 | none | 2.000 | 1.400 |", "| 4 | none | 3.000 | 1.300 |", f"| 4 | 0.1 | 3.000 | {threshold_rate / 100:.3f} |")
    assert [line for line in text.splitlines() if line.startswith(("| 2 |", "| 4 |"))] == list(rows)
    assert ("confidence threshold of 0.1" in text) == (asked[1] is not None)
    with pytest.raises(UserError, match="holds no speed of the drafter in"):
        card.fastest(Results.read(tmp_path / "out"), tmp_path / "smollm2-135m")
