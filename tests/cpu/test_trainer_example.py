"""examples/trainer.py runs as it stands, and prints two columns that agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import transformers

from against_plain import llama
from trainer_runs import word_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def test_the_columns_of_both_trainers_agree(tmp_path: Path) -> None:
    llama(3).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    texts = [" ".join(f"w{(7 * row + 3 * word) % 250 + 2}" for word in range(4 + row % 5)) for row in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    command = [sys.executable, str(ROOT / "examples" / "trainer.py"), "--model", "model", "--data", "rows.jsonl",
               "--steps", "4", "--accumulation", "3", "--lr", "1e-3", "--compare", "--cpu",
               "--device-memory", "1MiB", "--disk-dir", "spill"]  # fmt: skip
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^ +(\d+) +(\d\.\d+) +(\d\.\d+) +(\S+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, *_ in lines] == [1, 2, 3, 4]
    assert all(float(difference) < 1e-5 * float(theirs) for _, theirs, _, difference in lines)
    assert len({theirs for _, theirs, *_ in lines}) == 4  # the model moves
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert not trained.lm_head.weight.equal(llama(3).lm_head.weight)
