"""The run configuration: file, flags and settings, and all mistakes at once with their lines (reports 59, 63)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.config import FLAGS, SECTIONS, RunConfig, helps
from headrace.cli.config_file import ConfigError, read_config
from headrace.cli.names import ELSEWHERE, INSIDE, nearest


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model folder, data and a valid run.yaml, which is returned."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    file = tmp_path / "run.yaml"
    file.write_text("model: model\ndata: [a.txt]\noutput: out\nlr: 1e-4\n")
    return file


def mistakes(file: Path | None, flags: dict[str, Any] | None = None, settings: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_config(file, flags or {}, settings)
    return caught.value.problems


def test_every_mistake_is_reported_at_once_with_line_value_and_nearest_name(good: Path) -> None:
    lines = [
        "model: model", "data: [a.txt, nowhere.txt]", "output: 2024", "stepz: 10", "lr: fast", "betas: [0.9, 1.5]",
        "schedule: cosin", "placement:", "  weights: dsk", "  stat: host", "batch: 0", "accumulation: 2.5",
        "dtype: fp16", "device_memory: 8 bananas", "steps: 5", "steps: 6", "resume: maybe", "threads: true",
        "seed: -1", "validation: 1.5", "eps: .nan", "keep: [1]", "device: gpu", "max_grad_norm: 0", "window: 0",
    ]  # fmt: skip
    good.write_text("\n".join(lines))
    found = mistakes(good, {"epochs": "x"}, ("max-grad-norm=1", "lr", "moments=int3"))
    expected = [
        (2, "'nowhere.txt' does not exist"), (3, "output = 2024 is not text"),
        (4, "stepz is not an option; nearest: steps"),
        (5, "lr = 'fast' is not a number"), (6, "betas = 1.5 is too large: less than 1"),
        (7, "schedule = 'cosin' is not one of linear, cosine, constant; nearest: cosine"),
        (9, "placement.weights = 'dsk' is not one of auto, device, host, disk; nearest: disk"),
        (10, "placement.stat is not an option; nearest: state"), (11, "batch = 0 is too small: at least 1"),
        (12, "accumulation = 2.5 is not a whole number"), (13, "dtype = 'fp16' is refused: float16 ends at 65504"),
        (14, "device_memory = '8 bananas' is no size"), (16, f"steps stands here and in {good}:15"),
        (17, "resume = 'maybe' is not true or false"), (18, "threads = True is true, which this option does not take"),
        (19, "seed = -1 is too small: at least 0"), (20, "validation = 1.5 is no fraction"),
        (21, "eps = nan is not a finite number"), (22, "keep = [1] is not a whole number"),
        (23, "device = 'gpu' is no device"), (24, "max_grad_norm = 0 is too small: more than 0"),
        (25, "window = 0 is too small: at least 1"),
    ]  # fmt: skip
    for line, text in expected:
        assert any(problem.startswith(f"{good}:{line}: ") and text in problem for problem in found), (line, text, found)
    for text in (
        "--epochs: epochs = 'x' is not a whole number",
        "--set: 'lr' is not of the form name=value",
        "--set moments: moments = 'int3' is not one of float32, bfloat16",
        "--set max-grad-norm: max-grad-norm is not an option; nearest: max_grad_norm",
    ):
        assert text in found
    assert len(found) == len(expected) + 4
    numbers = [int(problem.split(":")[1]) for problem in found if problem.startswith(str(good))]
    assert numbers == sorted(numbers)


def test_missing_options_are_named_together() -> None:
    found = mistakes(None)
    assert len(found) == 3
    assert all(any(word in problem for problem in found) for word in ("--model", "--data", "--output"))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ("config_model: model", "exclude each other"),
        ("steps: 3\nepochs: 2", "steps and epochs exclude each other"),
        ("eval_every: 5", "eval_every needs held-out data"),
        ("placement: {weights: host}", "names only one of weights and state"),
        ("placement: {weights: disk, state: disk}", "needs a folder: --disk-dir"),
        ("steps: 4\nwarmup: 4", "leaves nothing of the 4 steps"),
        ('placement: {weights: {0: disk, "*": host}, state: host}', "needs a folder: --disk-dir"),
        ("placement: {weights: {0: dsk}, state: host}", "gives 'dsk', which is not one of device, host, disk; near"),
        ("autocast: bfloat16", "autocast is for dtype = float32: with bfloat16 weights"),
        ("lora: {rank: 8}", "lora.rank is not an option; nearest: r"),
        ("disk_dir: a.txt/x", "a.txt is a file"),
        ("disk_dir: /proc/spill", "disk_dir = '/proc/spill' cannot be used: nothing can be made in /proc: "),
        ("log: model", "log = 'model' cannot be used: it is a folder"),
        ("log: a.txt/log.jsonl", "a.txt is a file"),
        ("tokenizer: ./nowhere", "does not exist"),
        ("validation: nowhere", "does not exist"),
    ],
)
def test_combinations_that_are_refused(good: Path, extra: str, text: str) -> None:
    good.write_text(good.read_text() + extra + "\n")
    (problem,) = mistakes(good)
    assert text in problem
    assert problem.startswith(f"{good}:")


@pytest.mark.parametrize(
    "content", ['{"max_position_embeddings": 64}', '{"n_positions": 64}', '{"text_config": {"n_positions": 64}}']
)
def test_longer_rows_than_the_model_has_positions(good: Path, content: str) -> None:
    """As its config.json says, with all other mistakes and before anything is loaded."""
    (good.parent / "model" / "config.json").write_text(content)
    good.write_text(good.read_text() + "sequence_length: 65\nkeep: 0\n")
    assert mistakes(good) == [f"{good}:5: sequence_length = 65 is more than the model's 64 positions",
                              f"{good}:6: keep = 0 is too small: at least 1"]  # fmt: skip
    assert read_config(good, {"sequence_length": "64"}, ("keep=1",))[0].sequence_length == 64


def test_what_is_found_later_is_placed_too(good: Path) -> None:
    good.write_text(good.read_text() + "lora: {r: 8}\n")
    _, given = read_config(good, {"steps": "5"}, ("lora.targets=[x]",))
    later = ConfigError([("lr", "a"), ("steps", "b"), ("lora.targets", "c"), ("lora.r", "d"), "e", ("lora", "f")])
    assert later.problems == ["a", "b", "c", "d", "e", "f"]
    assert later.placed(given).problems == [
        f"{good}:4: a", "--steps: b", "--set lora.targets: c", f"{good}:5: d", "e", f"{good}:5: f",
    ]  # fmt: skip


def test_output_over_the_model_is_refused(good: Path) -> None:
    assert "output is the model's own folder" in mistakes(good, {"output": "./model/"})[0]


def test_from_scratch_needs_a_tokenizer(good: Path) -> None:
    good.write_text("config_model: model\ndata: a.txt\noutput: out\n")
    assert "config_model needs --tokenizer" in mistakes(good)[0]
    config, _ = read_config(good, {"tokenizer": "model"}, ())
    assert config.config_model == str(good.parent / "model")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lr: [1\nsteps: 2\n", "run.yaml:2: not YAML"),
        ("- lr\n", "run.yaml:1: expected lines such as"),
        ("lr: 1\n\tsteps: 2\n", "run.yaml:2: not YAML"),
        ("lr: !python/object:os.system 1\n", "run.yaml:1: a value that cannot be read"),
    ],
)
def test_files_that_are_no_configuration(good: Path, text: str, problem: str) -> None:
    good.write_text(text)
    assert any(problem in found for found in mistakes(good))


@pytest.mark.parametrize("text", [None, "lr: [1\n", "- lr\n"])
def test_a_file_that_cannot_be_read_is_the_only_mistake(tmp_path: Path, text: str | None) -> None:
    """What it would have said is not missing; what the command line says is still checked."""
    file = tmp_path / "no.yaml"
    if text is None:
        assert mistakes(file) == [f"--config: cannot read {file}: No such file or directory"]
    else:
        file.write_text(text)
        assert len(mistakes(file)) == 1
    assert len(mistakes(file, {"batch": "x"})) == 2


def test_a_value_that_cannot_be_read_is_one_mistake(good: Path) -> None:
    good.write_text(good.read_text().replace("[a.txt]", "!foo x").replace("lr: 1e-4", "lr: !foo x"))
    assert [problem.split(": ")[0] for problem in mistakes(good)] == [f"{good}:2", f"{good}:4"]


def misspelt(name: str) -> set[str]:
    """`name` with a letter lost, doubled or swapped with its neighbour, and in the spellings of other files."""
    found = {name.replace("_", "-"), name.replace("_", ""), name.upper(), name.title().replace("_", ""), name + "s"}
    for place in range(len(name)):
        found |= {name[:place] + name[place + 1 :], name[:place] + name[place] + name[place:]}
        if place + 1 < len(name):
            found.add(name[:place] + name[place + 1] + name[place] + name[place + 2 :])
    return found - set(RunConfig.model_fields) - {""}


def test_the_nearest_name_is_the_meant_one() -> None:
    """For every option and every slip of one letter; and for what other trainers call it."""
    names = list(RunConfig.model_fields)
    wrong = {word: found for name in names for word in misspelt(name) if (found := nearest(word, names)[0]) != name}
    assert wrong == {}
    for word, name in ELSEWHERE.items():
        assert word not in names
        assert nearest(word.replace("_", "-"), names) == (name, 1.0)
    inside = {name: section for section in SECTIONS.values() for name in section.model_fields}
    for word, name in INSIDE.items():
        assert word not in inside
        assert nearest(word, list(inside[name].model_fields)) == (name, 1.0)


@pytest.mark.parametrize("value", ["disk", "[host, disk]", "3"])
def test_a_placement_of_another_form_is_told_the_form(good: Path, value: str) -> None:
    good.write_text(good.read_text() + f"placement: {value}\n")
    (problem,) = mistakes(good)
    assert problem.endswith('is not "auto" and not of the form {"weights": "host", "state": "disk"}')
    good.write_text(good.read_text().replace(value, '{"weights": "host", "state": "disk"}') + "disk_dir: spill\n")
    assert read_config(good, {}, ())[0].placement.state == "disk"


NON_DEFAULT: dict[str, tuple[Any, Any]] = {
    "steps": (7, 9), "batch": (2, 3), "accumulation": (4, 5), "sequence_length": (32, 64), "packing": (False, True),
    "chat_template": ("/etc/hostname", "/etc/passwd"),
    "long_rows": ("drop", "cut"), "broken_rows": ("skip", "refuse"), "lr": (0.5, 0.25),
    "schedule": ("cosine", "constant"),
    "warmup": (1, 2), "max_grad_norm": (0.5, 2.0), "betas": ([0.5, 0.6], [0.7, 0.8]), "eps": (1e-6, 1e-7),
    "weight_decay": (0.1, 0.2), "dtype": ("float32", "bfloat16"), "moments": ("bfloat16", "float32"),
    "on_nonfinite": ("stop", "skip"), "guard_every": (10, 20),
    "device": ("cpu", "cuda:1"), "device_memory": ("1GiB", "2GiB"),
    "host_memory": (1000, 2000), "disk_dir": ("/tmp/a", "/tmp/b"), "window": (4, 5), "rows": (1, 2), "threads": (1, 2),
    "validation": (0.1, 0.2), "eval_every": (3, 4), "save_every": (5, 6), "keep": (1, 3), "seed": (8, 9),
    "resume": (True, False), "log": ("/tmp/c", "/tmp/d"), "tokenizer": ("org/c", "org/d"),
    "placement": ({"weights": "host", "state": "host"}, {"weights": "device", "state": "host"}),
    "headroom": (0.25, "2GiB"), "activations": ("keep", {"*": "host", "0": "keep"}),
    "trace": (3, "every 5"), "max_temperature": (80.5, 70),
    "lora": ({"r": 3, "targets": ["q_proj"]}, {"alpha": 5.0, "dora": True}),
    "quantize": ({"codec": "int8/row"}, "nf4/128+double"), "attention": ("math", "auto"),
    "compile": (True, False), "overlap": (False, True), "check_memory": (False, True),
    "products": ("stored", "decoded"), "update": ("host", "both"), "blocks": (["model.layers"], ["a", "b"]),
}  # fmt: skip


@pytest.mark.parametrize("name", NON_DEFAULT)
def test_each_option_of_the_file_is_effective_and_the_command_line_wins(good: Path, name: str) -> None:
    """Report 59: an explicit option is never silently replaced."""
    first, second = NON_DEFAULT[name]
    good.write_text(
        good.read_text().replace("lr: 1e-4\n", "") + yaml.safe_dump({name: first, "validation": 0.3} | {name: first})
    )

    def effective(flags: dict[str, Any], *settings: str) -> Any:
        return read_config(good, flags, settings)[0].model_dump(mode="json")[name]

    expected = RunConfig.model_validate({name: first}).model_dump(mode="json")[name]
    wanted = RunConfig.model_validate({name: second}).model_dump(mode="json")[name]
    assert effective({}) == expected != wanted
    assert effective({}, f"{name}={yaml.safe_dump(second, default_flow_style=True).splitlines()[0]}") == wanted
    if name in FLAGS:
        assert effective({name: second if isinstance(second, bool) else str(second)}) == wanted


def test_the_table_above_covers_every_option() -> None:
    others = {"model", "config_model", "data", "output", "epochs", "autocast"}  # which needs dtype = float32 beside it
    assert {*NON_DEFAULT, *others} == set(RunConfig.model_fields)


def test_flag_and_setting_for_one_option_are_refused(good: Path) -> None:
    assert "--lr gives this option too" in mistakes(good, {"lr": "1"}, ("lr=1",))[0]
    assert "--set lr gives this option too" in mistakes(good, {}, ("lr=1", "lr=2"))[0]
    assert "--set placement gives this option too" in mistakes(good, {}, ("placement=auto", "placement.state=host"))[0]


def test_a_flag_replaces_its_rival_in_the_file_and_says_so(good: Path) -> None:
    good.write_text(good.read_text() + "epochs: 3\n")
    config, given = read_config(good, {"steps": "5"}, ())
    assert (config.steps, config.epochs) == (5, None)
    assert given.notes == [f"--steps replaces epochs from {good}:5"]
    assert "exclude each other" in mistakes(good, {"steps": "5", "epochs": "2"})[0]


def test_nested_settings_and_repeated_data(good: Path) -> None:
    settings = ("placement.weights=device", "placement.state=host", "max_grad_norm=null")
    config, given = read_config(good, {"data": ["b.txt", "a.txt"]}, settings)
    assert (config.placement.weights, config.placement.state, config.max_grad_norm) == ("device", "host", None)
    assert config.data == (str(good.parent / "b.txt"), str(good.parent / "a.txt"))
    assert given.places[("data",)] == "--data"
    assert given.places[("lr",)] == f"{good}:4"


def test_the_written_configuration_means_the_same_from_anywhere(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = read_config(good, {"validation": ["b.txt"], "device_memory": "1GiB"}, ())
    written = good.parent / "effective.yaml"
    written.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    monkeypatch.chdir("/")
    assert read_config(written, {}, ())[0] == config


def test_tiers_by_block_are_those_of_wrap(good: Path) -> None:
    """Also after run.yaml has been written and read: a block's number is a number again."""
    good.write_text(good.read_text() + 'placement: {weights: {0: device, -1: disk, "*": host}}\ndisk_dir: spill\n')
    good.write_text(good.read_text() + 'activations: {-1: keep, "*": host}\n')
    given = ("placement.state=host", "placement.weights.1=device")
    config, _ = read_config(good, {}, given)
    asked = {"weights": {0: "device", -1: "disk", "*": "host", 1: "device"}, "state": "host"}
    assert config.placement.asked() == asked
    good.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert read_config(good, {}, ())[0].placement.asked() == asked
    assert RunConfig().placement.asked() == "auto"
    assert config.activations == {-1: "keep", "*": "host"} == read_config(good, {}, ())[0].activations


def test_hub_names_stay_as_they_are(good: Path) -> None:
    assert read_config(good, {"model": "someone/some-model"}, ())[0].model == "someone/some-model"
    assert "does not exist" in mistakes(good, {"model": "./someone"})[0]
    assert "no config.json" in mistakes(good, {"model": "."})[0]


def test_every_option_has_a_help_text_and_the_flags_are_frozen() -> None:
    assert all(len(text) > 10 for text in helps().values())
    assert set(FLAGS) == {
        "model", "config_model", "tokenizer", "data", "output", "steps", "epochs", "batch", "accumulation",
        "sequence_length", "lr", "device", "device_memory", "host_memory", "disk_dir", "validation", "eval_every",
        "save_every", "seed", "resume", "trace", "max_temperature", "quantize",
    }  # fmt: skip
