"""Every causal language model of the installed transformers that can be built tiny: streamed right, or refused."""

from __future__ import annotations

import copy
import os
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.base.errors import HeadraceError
from headrace.executor import stream
from parity import zoo
from parity.cases import mover
from parity.reference import TOLERANCE, Trace, check, sgd, train_plain, train_streamed

NEEDED = 60
"""Classes that must stream."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {"placement": {"weights": "host", "state": "host"}},
    {"placement": {"weights": "disk", "state": "disk"}, "activations": "host", "rows": 1},
    {"placement": {"weights": "device", "state": "host"}, "rows": 2, "activations": "keep"},
)
"""Each class meets one of them, in turn; with --all-families all."""


class Outcomes:
    """What became of each class: "streamed", "refused: why", "not built: why", or "failed". One file for each, since
    tests may run in several processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def note(self, class_name: str, text: str) -> None:
        path = self._folder / class_name
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)

    def all(self) -> dict[str, str]:
        """Of all classes; waits for those that run beside this process."""
        while missing := [name for name in zoo.class_names() if not (self._folder / name).exists()]:
            assert os.environ.get("PYTEST_XDIST_WORKER"), f"no outcome of {missing}"
            time.sleep(0.2)
        return {name: (self._folder / name).read_text() for name in zoo.class_names()}

    def named(self, outcome: str) -> list[str]:
        return sorted(name for name, text in self.all().items() if text.startswith(outcome))


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    own = tmp_path_factory.getbasetemp()
    return Outcomes((own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own) / "zoo")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers has much to say about such configurations."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def plain(class_name: str, device: str) -> tuple[Any, Trace]:
    """The model and its plain run. It must train on the CPU first: there an index beyond a table is an exception, on a
    GPU it is the end of the process."""
    model = zoo.build(class_name)
    for place in dict.fromkeys(("cpu", device)):
        other = copy.deepcopy(model).to(place)
        trace = train_plain(other, sgd(other.parameters()), zoo.ZOO, None, zoo.steps(class_name), mover(place))
    return model, trace


@pytest.mark.parametrize("class_name", zoo.class_names())
def test_class(
    class_name: str, outcomes: Outcomes, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:  # fmt: skip
    """Losses, gradients and weights of two steps, tensor by tensor."""
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    try:
        model, want = plain(class_name, device)
    except Exception as error:  # transformers itself cannot build or train it here
        outcomes.note(class_name, f"not built: {type(error).__name__}: {' '.join(str(error).split())[:100]}")
        pytest.skip(f"not built: {type(error).__name__}")
    outcome = "failed"
    number = zoo.class_names().index(class_name) % len(OPTIONS)
    try:
        for options in OPTIONS if pytestconfig.getoption("--all-families") else (OPTIONS[number],):
            whole = {"rows": None} if zoo.family_name(class_name) in zoo.RANDOM else {}
            got = streamed(copy.deepcopy(model), class_name, device, {**options, **whole, "disk_dir": tmp_path})
            # A GPU sums in other orders for rows, tiles and whole batches: several such bits on the way.
            noise = zoo.NOISE.get(zoo.family_name(class_name), 0.0) if device != "cpu" else 0.0
            check(got, want, max(TOLERANCE, 4 * noise))
        outcome = "streamed"
    except HeadraceError as error:
        outcome = f"refused: {' '.join(str(error).split())}"
    finally:
        outcomes.note(class_name, outcome)


def streamed(model: Any, class_name: str, device: str, options: dict[str, Any]) -> Trace:
    model, optimizer = headrace.wrap(
        model, sgd(model.parameters()), device=device, window=2, debug=True, threads=1, **options
    )
    with headrace.session(model):
        return train_streamed(model, optimizer, zoo.ZOO, zoo.steps(class_name), mover(device))


def test_enough_classes_stream(outcomes: Outcomes, device: str, request: pytest.FixtureRequest) -> None:
    """At least sixty do, and FAMILIES.md says which do on the CPU; --write-families writes it."""
    chosen = {
        item.callspec.params["class_name"] for item in request.session.items if item.name.startswith("test_class[")
    }
    if chosen != set(zoo.class_names()):
        pytest.skip("only some classes were chosen")
    import transformers

    assert len(outcomes.named("streamed")) >= NEEDED
    if device != "cpu":
        return
    document = zoo.ROOT / "FAMILIES.md"
    if request.config.getoption("--write-families"):
        document.write_text(families(outcomes))
    written = document.read_text()
    if f"transformers {transformers.__version__}" in written:
        assert written == families(outcomes), "write it again: scripts/test tests/parity/test_zoo.py --write-families"


def families(outcomes: Outcomes) -> str:
    """The document, from what has just been found."""
    import transformers

    found, refused, rest = (outcomes.named(outcome) for outcome in ("streamed", "refused", "not built"))
    about = (
        f"What `tests/parity/test_zoo.py` finds with transformers {transformers.__version__}: it builds every class of "
        "the mapping for causal language models tiny, streams it, and compares losses, gradients and weights of two "
        "steps tensor by tensor with plain PyTorch. Other kinds of models (T5, vision-language models, ViT, BERT and "
        "its relatives) are in `tests/parity/named_families.py`."
    )
    reasons = [f"{name}: {outcomes.all()[name].removeprefix('refused: ')}" for name in refused]
    untried = "No tiny model of theirs trains in plain PyTorch here."
    parts = (
        ["# Families", _wrapped(about)]
        + [f"## Streamed: {len(found)}", _wrapped(", ".join(found))]
        + [f"## Refused: {len(refused)}", *map(_wrapped, reasons)]
        + [f"## Not tried: {len(rest)}", untried, _wrapped(", ".join(rest))]
    )
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
