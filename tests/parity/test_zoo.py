"""Every causal language model of the installed transformers that can be built tiny: streamed right, or refused."""

from __future__ import annotations

import copy
import functools
import os
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
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
    """What became of each class: "streamed", "refused: why", "not built: why", or "failed: how". Each is tried once,
    by whoever asks first, though tests run in several processes: one file for each says so."""

    def __init__(self, folder: Path, try_class: Callable[[str], str]) -> None:
        self._folder = folder
        self._try = try_class
        folder.mkdir(exist_ok=True)

    def of(self, class_name: str) -> str:
        path = self._folder / class_name
        try:
            path.with_suffix(".begun").touch(exist_ok=False)
        except FileExistsError:
            while not path.exists():  # a process beside this one is at it
                time.sleep(0.1)
            return path.read_text()
        text = self._try(class_name)
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)
        return text

    def named(self, outcome: str) -> list[str]:
        return sorted(name for name in zoo.class_names() if self.of(name).startswith(outcome))


@pytest.fixture
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, device: str, pytestconfig: pytest.Config
) -> Outcomes:
    own = tmp_path_factory.getbasetemp()
    every = bool(pytestconfig.getoption("--all-families"))
    try_class = functools.partial(tried, device=device, disk_dir=tmp_path, every=every)
    return Outcomes((own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own) / "zoo", try_class)


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


def tried(class_name: str, device: str, disk_dir: Path, every: bool) -> str:
    """Losses, gradients and weights of two steps, tensor by tensor, with one or `every` set of options."""
    try:
        model, want = plain(class_name, device)
    except Exception as error:  # transformers itself cannot build or train it here
        return f"not built: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
    number = zoo.class_names().index(class_name) % len(OPTIONS)
    whole = {"rows": None} if zoo.family_name(class_name) in zoo.RANDOM else {}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stream, "SMALLEST_STASH", 1)
            for options in OPTIONS if every else (OPTIONS[number],):
                got = streamed(copy.deepcopy(model), class_name, device, {**options, **whole, "disk_dir": disk_dir})
                # A GPU sums in other orders for rows, tiles and whole batches: several such bits on the way.
                noise = zoo.NOISE.get(zoo.family_name(class_name), 0.0) if device != "cpu" else 0.0
                check(got, want, max(TOLERANCE, 4 * noise))
    except HeadraceError as error:
        return f"refused: {' '.join(str(error).split())}"
    except Exception:
        return f"failed: {traceback.format_exc()}"
    return "streamed"


@pytest.mark.parametrize("class_name", zoo.class_names())
def test_class(class_name: str, outcomes: Outcomes) -> None:
    outcome = outcomes.of(class_name)
    if outcome.startswith("not built"):
        pytest.skip(" ".join(outcome.split()[:3]))
    assert not outcome.startswith("failed"), outcome


def streamed(model: Any, class_name: str, device: str, options: dict[str, Any]) -> Trace:
    model, optimizer = headrace.wrap(
        model, sgd(model.parameters()), device=device, window=2, debug=True, threads=1, **options
    )
    with headrace.session(model):
        return train_streamed(model, optimizer, zoo.ZOO, zoo.steps(class_name), mover(device))


@pytest.mark.timeout(1200)  # it tries those classes whose own tests have not begun
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
    reasons = [f"{name}: {outcomes.of(name).removeprefix('refused: ')}" for name in refused]
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
