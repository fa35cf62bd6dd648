"""Every causal language model of the installed transformers that can be built tiny: streamed right, or refused."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.base.errors import HeadraceError
from headrace.executor import stream
from parity import zoo
from parity.reference import Trace, check, sgd, train_plain, train_streamed

NEEDED = 60
"""Classes that must stream."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {"placement": {"weights": "host", "state": "host"}},
    {"placement": {"weights": "disk", "state": "disk", "inputs": "host"}, "rows": 1},
    {"placement": {"weights": "device", "state": "host"}, "rows": 2, "recompute": False},
)
"""Each class meets one of them, in turn; with --all-families all."""
OUTCOMES: dict[str, str] = {}
"""By class: "streamed", "refused: why", or "not built: why"."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers has much to say about such configurations."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def plain(class_name: str) -> tuple[Any, Trace]:
    """The model and its plain run. Skips what transformers itself cannot build or train here."""
    try:
        model = zoo.build(class_name)
        other = copy.deepcopy(model)
        return model, train_plain(other, sgd(other.parameters()), zoo.ZOO, None, zoo.steps(class_name))
    except Exception as error:
        OUTCOMES[class_name] = f"not built: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
        pytest.skip(OUTCOMES[class_name])


@pytest.mark.parametrize("class_name", zoo.class_names())
def test_class(class_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """Losses, gradients and weights of two steps, tensor by tensor."""
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    model, want = plain(class_name)
    number = zoo.class_names().index(class_name) % len(OPTIONS)
    for options in OPTIONS if pytestconfig.getoption("--all-families") else (OPTIONS[number],):
        whole = {"rows": None} if zoo.family_name(class_name) in zoo.RANDOM else {}
        try:
            got = streamed(copy.deepcopy(model), class_name, {**options, **whole, "disk_dir": tmp_path})
        except HeadraceError as error:
            OUTCOMES[class_name] = f"refused: {' '.join(str(error).split())}"
            return
        check(got, want)
    OUTCOMES[class_name] = "streamed"


def streamed(model: Any, class_name: str, options: dict[str, Any]) -> Trace:
    model, optimizer = headrace.wrap(
        model, sgd(model.parameters()), device="cpu", window=2, debug=True, threads=1, **options
    )
    with headrace.session(model):
        return train_streamed(model, optimizer, zoo.ZOO, zoo.steps(class_name))


def test_enough_classes_stream(pytestconfig: pytest.Config) -> None:
    """At least sixty do, and FAMILIES.md says which; --write-families writes it."""
    if OUTCOMES.keys() != set(zoo.class_names()):
        pytest.skip("only some classes ran")
    import transformers

    assert len(named("streamed")) >= NEEDED
    document = zoo.ROOT / "FAMILIES.md"
    if pytestconfig.getoption("--write-families"):
        document.write_text(families())
    written = document.read_text()
    if f"transformers {transformers.__version__}" in written:
        assert written == families(), "write it again: scripts/test tests/parity/test_zoo.py --write-families"


def named(outcome: str) -> list[str]:
    return sorted(name for name, text in OUTCOMES.items() if text.startswith(outcome))


def families() -> str:
    """The document, from what has just been found."""
    import transformers

    streamed_, refused, rest = named("streamed"), named("refused"), named("not built")
    about = (
        f"What `tests/parity/test_zoo.py` finds with transformers {transformers.__version__}: it builds every class of "
        "the mapping for causal language models tiny, streams it, and compares losses, gradients and weights of two "
        "steps tensor by tensor with plain PyTorch. Other kinds of models (T5, vision-language models, ViT, BERT and "
        "its relatives) are in `tests/parity/named_families.py`."
    )
    reasons = [f"{name}: {OUTCOMES[name].removeprefix('refused: ')}" for name in refused]
    untried = "No tiny model of theirs trains in plain PyTorch here."
    parts = (
        ["# Families", _wrapped(about)]
        + [f"## Streamed: {len(streamed_)}", _wrapped(", ".join(streamed_))]
        + [f"## Refused: {len(refused)}", *map(_wrapped, reasons)]
        + [f"## Not tried: {len(rest)}", untried, _wrapped(", ".join(rest))]
    )
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
