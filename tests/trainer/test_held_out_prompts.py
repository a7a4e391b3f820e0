"""The prompts that drafting is tuned on are those of the conversations that training leaves out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from vllm_lilicorr.errors import UserError
from vllm_lilicorr.trainer.corpus import Conversation, Corpus, Origin, write_meta, write_shard
from vllm_lilicorr.trainer.data import DataConfig, split
from vllm_lilicorr.trainer.held_out_prompts import main

CONFIG = str(Path(__file__).parents[2] / "configs/smollm2-135m.yaml")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Twelve conversations of the rows 0, 2, 4, ..., as a source with unusable rows leaves them, one of them in two parts."""
    write_meta(tmp_path, Origin("tiny", "0", "0"), {"temperature": 0.0}, "prompts", 1)
    keys = [(2 * row, 0) for row in range(12)] + [(22, 1)]
    write_shard(tmp_path, 0, 1, [Conversation(key, np.arange(9), ((2, 9),), ("stop",)) for key in keys], Counter())
    return tmp_path


def test_they_are_the_rows_training_never_sees(corpus: Path) -> None:
    source, out = corpus / "prompts.jsonl", corpus / "development/rows.jsonl"
    source.write_text("".join(json.dumps({"turns": [f"question {row}"]}) + "\n" for row in range(24)))
    words = ["--config", CONFIG, "--prompts", str(source), "--out", str(out), f"data.path={corpus}"]
    main([*words, "data.holdout=4"])
    written = {int(json.loads(line)["turns"][0].split()[1]) for line in out.read_text().splitlines()}
    found = Corpus(str(corpus))
    train, held_out, _ = split(found, DataConfig(path=str(corpus), holdout=4))
    assert written == {found[int(i)].key[0] for i in held_out} and len(written) == 4
    assert not written & {found[int(i)].key[0] for i in train}
    with pytest.raises(UserError, match="data.holdout: is 0"):
        main([*words, "data.holdout=0"])
    source.write_text('{"turns": ["one"]}\n')
    with pytest.raises(UserError, match="has 1 rows and the corpus in .* a row"):
        main([*words, "data.holdout=4"])
