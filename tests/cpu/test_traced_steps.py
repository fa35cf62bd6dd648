"""The option `trace`: which steps get a file, what is in it, and that numbers and speed of the others are untouched."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import headrace
import tiny_runs
from headrace.session import tracing
from headrace.spec.traced import TracedSteps


def run(folder: Path, steps: int, where: str = "disk", **options: Any) -> tuple[Any, list[float]]:
    model = tiny_runs.tiny_llama()
    given = {"max_grad_norm": 1.0, "trace_dir": folder / "traces", **options}
    model, optimizer = tiny_runs.wrap(model, tiny_runs.adamw(model), where, folder, **given)
    return model, tiny_runs.train(model, optimizer, 0, steps)


def files(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in sorted((folder / "traces").glob("*"))]


def complete(folder: Path, step: int) -> list[dict[str, Any]]:
    text = (folder / "traces" / f"step-{step:08d}.json").read_text()
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("where", ["disk", "inline", "device"])
def test_the_first_steps_and_only_those(where: str, tmp_path: Path) -> None:
    """Each file holds all ops of one forward, backward and update, once, and the step itself; losses are the same."""
    model, losses = run(tmp_path, 5, where, trace=2)
    session = headrace.session(model)
    session.close()
    assert files(tmp_path) == [1, 2]
    other, plain = run(tmp_path, 5, where)
    assert losses == plain
    names = [Counter(event["name"] for event in complete(tmp_path, step)) for step in (1, 2)]
    assert names[0].keys() - {"step 1"} == names[1].keys() - {"step 2"}
    for number, found in enumerate(names, 1):
        assert found[f"step {number}"] == found["NORM grads"] == 1
        assert sum(count for name, count in found.items() if name.startswith(("FORWARD model", "BACKWARD model"))) == 6
        assert sum(count for name, count in found.items() if name.startswith("UPDATE")) >= 3
    written = [event for event in session.events if event.kind == "trace"]
    assert [event.numbers["step"] for event in written] == [1, 2]
    assert written[1].numbers["ops"] == sum(names[1].values()) - 1
    headrace.session(other).close()


def test_one_in_so_many_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "KEPT", 2)
    model, _ = run(tmp_path, 9, trace="every 2")
    headrace.session(model).close()
    assert files(tmp_path) == [6, 8]


def test_a_trace_of_the_user_goes_first(tmp_path: Path) -> None:
    """Steps inside `record_trace` are in that trace; afterwards the option goes on, and nothing records for ever."""
    model, _ = run(tmp_path, 1, trace="every 2")
    session = headrace.session(model)
    with session.record_trace() as own:
        tiny_runs.train(model, session.optimizer, 1, 3)
    assert [program.name for program in own.programs] == ["forward", "backward", "update"] * 2
    tiny_runs.train(model, session.optimizer, 3, 4)
    assert session._executor.trace is None, "step 4 began inside the user's trace"
    tiny_runs.train(model, session.optimizer, 4, 6)
    session.close()
    assert files(tmp_path) == [6]


def test_a_step_that_is_given_up_does_not_hold_its_trace_back(tmp_path: Path) -> None:
    model, _ = run(tmp_path, 0, "host", trace=1)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    session = headrace.session(model)
    model.model.layers[1].mlp.act_fn.forward = broken
    with pytest.raises(RuntimeError, match="broken"):
        model(**tiny_runs.batch(0))
    del model.model.layers[1].mlp.act_fn.forward
    tiny_runs.train(model, session.optimizer, 0, 1)
    tiny_runs.train(model, session.optimizer, 1, 1 + tracing.PATIENCE)
    assert files(tmp_path) == [1]
    session.close()


def test_a_folder_that_cannot_be_written_costs_the_trace_and_not_the_run(tmp_path: Path) -> None:
    model, _ = run(tmp_path, 1, trace=3)
    (tmp_path / "traces").write_text("a file")
    session = headrace.session(model)
    tiny_runs.train(model, session.optimizer, 1, 5)
    session.close()
    (event,) = [event for event in session.events if event.kind == "trace"]
    assert "no trace is written" in event.text and session.steps == 5


def test_which_steps() -> None:
    assert [step for step in range(1, 9) if TracedSteps.of("3").wants(step, step - 1)] == [1, 2, 3]
    assert [step for step in range(1, 9) if TracedSteps.of("every 4").wants(step, step - 1)] == [4, 8]
    assert TracedSteps.of(2).wants(101, 0), "the first of a resumed run"
    assert not any(TracedSteps.of(None).wants(step, step - 1) for step in range(1, 9))
    for wrong in (0, -1, True, "every", "every 0", "all", 1.5, "every 1e3", ""):
        with pytest.raises(headrace.OptionError, match="names no steps"):
            TracedSteps.of(wrong)
    with pytest.raises(headrace.OptionError, match=r"trace names no steps.*every 100"):
        headrace.wrap(tiny_runs.tiny_llama(), trace="sometimes")
