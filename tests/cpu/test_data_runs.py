"""`headrace train` on conversations, packed rows and datasets, against plain PyTorch, row by row and alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, BloomForCausalLM, OPTConfig, OPTForCausalLM

from cpu.test_cli_world import arguments, headrace, log_of, save_model, steps_of, weights_of
from cpu.test_data_samples import WORDS, word_tokenizer, write_jsonl
from headrace.data.encode import Encoder
from headrace.data.prepare import Shape, prepare
from headrace.data.sampler import Sampler
from headrace.data.table import TokenTable

TEMPLATE = (
    "{% for m in messages %}{{ 'the ' if m.role == 'user' else 'cat ' }}{{ m.content + (' </s> ' if m.role == "
    "'assistant' else ' ') }}{% endfor %}{% if add_generation_prompt %}{{ 'cat ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(model folder, conversations, chat template file)."""
    folder = tmp_path_factory.mktemp("world")
    made = []
    for place in range(29):
        words = [WORDS[(place * 5 + step * 3) % len(WORDS)] for step in range(8)]
        turns = [("user", words[: 1 + place % 3]), ("assistant", words[3 : 4 + place % 4])] * (1 + place % 2)
        made.append({"messages": [{"role": role, "content": " ".join(text)} for role, text in turns]})
    (folder / "template.jinja").write_text(TEMPLATE)
    return save_model(folder / "model"), write_jsonl(folder / "rows.jsonl", made), folder / "template.jinja"


def table_of(world: tuple[Path, Path, Path], folder: Path, packing: Any) -> TokenTable:
    tokenizer: Any = AutoTokenizer.from_pretrained(world[0])
    tokenizer.chat_template = TEMPLATE
    return prepare([world[1]], Encoder(tokenizer, 53), Shape(24, packing=packing, seed=5), folder)[0]


def plain_training(model_folder: Path, table: TokenTable) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What `arguments` asks for in plain PyTorch: each document alone, its loss over the labels of the step."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
    sampler = Sampler(len(table), 6, 5)
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in model.parameters() if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    losses = []
    for factor in (0.5, 1.0, 1.0, 0.75, 0.5, 0.25):
        chosen = sampler.next()
        total, count = torch.zeros(()), table.labels(chosen)
        for ids, trained in (document for index in chosen for document in table.row(int(index))):
            row, marks = torch.tensor(ids.tolist()), torch.tensor(trained.tolist())
            logits = model(row[None]).logits[0]
            total = total + cross_entropy(logits[:-1][marks[1:]], row[1:][marks[1:]], reduction="sum")
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count)
    return model.state_dict(), losses


@pytest.mark.parametrize("packing", ["true", "false"])
def test_conversations_train_as_in_a_plain_loop(packing: str, world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Packed or not: the losses and weights are those of each conversation alone. The template is exported."""
    changes = {"packing": packing, "chat_template": world[2], "sequence_length": 24}
    code, printed = headrace(*arguments(*world[:2], tmp_path / "out", **changes))
    assert code == 0, printed
    table = table_of(world, tmp_path, packing == "true")
    packed = [len(table.row(row)) > 1 for row in range(len(table))]
    assert any(packed) == (packing == "true") == (len(packed) < 29)
    wanted, losses = plain_training(world[0], table)
    assert [line["loss"] for line in steps_of(tmp_path / "out" / "log.jsonl")] == pytest.approx(losses, rel=2e-5)
    found = weights_of(tmp_path / "out")
    for name, tensor in wanted.items():
        if name in found:
            assert (found[name] - tensor).norm() <= 2e-5 * tensor.norm(), name
    assert "29 conversations" in printed and "the a cat>>>j </s><<<" in printed
    assert ("do not see each other (leak=0.0e+00" in printed) == (packing == "true")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE


def test_a_packed_run_goes_on_bit_for_bit(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Also with a validation split, and where documents are packed anew from the same data."""
    changes: dict[str, object] = {
        "packing": "true", "chat_template": world[2], "sequence_length": 24, "validation": 0.2, "save_every": 3,
        "batch": 2,
    }  # fmt: skip
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert headrace(*arguments(*world[:2], straight, **changes))[0] == 0
    assert headrace(*arguments(*world[:2], broken, **changes))[0] == 0
    for path in (
        broken / "config.json",
        *broken.glob("*.safetensors"),
        *(broken / "checkpoints" / "step-6").rglob("*"),
    ):
        if path.is_file():
            path.unlink()
    (broken / "checkpoints" / "step-6" / "session").rmdir()
    (broken / "checkpoints" / "step-6").rmdir()
    code, printed = headrace(*arguments(*world[:2], broken, **changes, resume=True))
    assert code == 0 and "step-3" in printed, printed
    ours, theirs = weights_of(broken), weights_of(straight)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    values = [[line.get("validation_loss") for line in log_of(folder / "log.jsonl")] for folder in (straight, broken)]
    assert [value for value in values[0] if value] == [value for value in values[1] if value]
    code, printed = headrace(*arguments(*world[:2], broken, **{**changes, "packing": "joined"}, resume=True))
    assert code == 1 and "packing True then, 'joined' now" in printed


def save_tiny(folder: Path, build: Callable[[], Any]) -> Path:
    torch.manual_seed(0)
    build().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def opt() -> Any:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 44, "num_hidden_layers": 2}
    return OPTForCausalLM(OPTConfig(vocab_size=53, num_attention_heads=4, max_position_embeddings=64, **sizes))


def bloom() -> Any:
    return BloomForCausalLM(BloomConfig(vocab_size=53, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize("build", [opt, bloom])
def test_models_whose_documents_would_see_each_other_are_refused(build: Callable[[], Any], tmp_path: Path) -> None:
    """Before the first step, with what to set instead; and that then trains."""
    model = save_tiny(tmp_path / "model", build)
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a b c"}, {"text": "the cat sat"}] * 9)
    changes: dict[str, object] = {"steps": 2, "warmup": 0}
    code, printed = headrace(*arguments(model, data, tmp_path / "out", packing="true", **changes))
    assert code == 1 and "cannot keep packed documents apart" in printed
    assert "packing=false" in printed and "packing=joined" in printed and "step 1" not in printed
    for packing in ("false", "joined"):
        code, printed = headrace(*arguments(model, data, tmp_path / packing, packing=packing, **changes))
        assert code == 0, printed


def test_a_missing_chat_template_and_a_wrong_packing_are_told(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    code, printed = headrace(*arguments(*world[:2], tmp_path / "out"))
    assert code == 1 and "the tokenizer has no chat template" in printed and "chat_template=FILE" in printed
    code, printed = headrace(*arguments(*world[:2], tmp_path / "out", packing="tight", chat_template="/no/file"))
    assert code == 2 and "packing = 'tight' is neither true nor false nor \"joined\"" in printed
    assert "chat_template = '/no/file' is no file" in printed


def test_datasets_train_like_the_same_rows_in_a_file(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([yaml.safe_load(line) for line in world[1].read_text().splitlines()])
    datasets.DatasetDict({"all": rows, "other": rows.select(range(3))}).save_to_disk(tmp_path / "saved")
    changes: dict[str, object] = {"chat_template": world[2], "sequence_length": 24, "steps": 2, "warmup": 0}
    for name, data in (("file", world[1]), ("dataset", f"{tmp_path / 'saved'}:all")):
        code, printed = headrace(*arguments(world[0], Path(data), tmp_path / name, **changes))
        assert code == 0, printed
    ours, theirs = weights_of(tmp_path / "dataset"), weights_of(tmp_path / "file")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    kept = yaml.safe_load((tmp_path / "dataset" / "run.yaml").read_text())
    assert kept["data"] == [f"{tmp_path / 'saved'}:all"] and kept["chat_template"] == str(world[2])
