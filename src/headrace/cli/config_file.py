"""YAML file, flags and `--set` to one RunConfig, with every mistake reported at once and by its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from headrace.base.errors import OptionError
from headrace.base.units import plural
from headrace.cli.config import SECTIONS, SHORT, RunConfig
from headrace.cli.config_rules import broken_rules, resolved
from headrace.cli.names import NEAR, nearest, strays, unknown

Place = tuple[str | int, ...]
"""Where a value stands in the configuration: ("lr",), ("placement", "weights"), ("data", 1)."""

INSTEAD = {"steps": "epochs", "epochs": "steps", "model": "config_model", "config_model": "model"}
"""Options of which one replaces the other: a flag silences the other's line in the file, with a note."""

FORMS = {
    "placement": 'is not "auto" and not of the form {"weights": "host", "state": "disk"}',
    "lora": 'is not of the form {"r": 16, "alpha": 32}, of whose options each has a default',
    "quantize": 'is not of the form nf4 or {"codec": "nf4", "keep_first": 1}',
}
"""What is wrong with a section that is none."""


class ConfigError(OptionError):
    """The configuration cannot be used; `problems` are all its mistakes, one line each.

    A problem given as (option, text) is one that is found where the configuration's lines are not known; `placed` puts
    them before it.
    """

    def __init__(self, problems: Sequence[str | tuple[str, str]]) -> None:
        self._found = list(problems)
        self.problems = [problem if isinstance(problem, str) else problem[1] for problem in problems]
        what, lines = (
            f"the configuration has {plural(len(self.problems), 'mistake')}",
            "\n".join(f"  {text}" for text in self.problems),
        )
        super().__init__(what, lines, "Correct each of them")
        self.args = (f"{what}:\n{lines}",)  # as a list; each line says what to do about it

    def placed(self, given: Given) -> ConfigError:
        """The same with the line or flag of each option."""
        return ConfigError([each if isinstance(each, str) else f"{given.where(tuple(each[0].split('.')))}: {each[1]}"
                            for each in self._found])  # fmt: skip


@dataclass
class Given:
    """Values as given, where each was given, and mistakes as (where, text). `source`: where the rest belongs."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Place, str] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    """Options that were given in a way that is reported already."""

    def where(self, place: Place) -> str:
        """The place of a value, or of what holds it."""
        while place and place not in self.places:
            place = place[:-1]
        return self.places.get(place, self.source)


def read_config(
    file: Path | None, flags: Mapping[str, Any], settings: Sequence[str], rest: Sequence[str] = ()
) -> tuple[RunConfig, Given]:
    """The effective configuration. `flags`: option to value, None where not given; `settings`: "name=value" texts;
    `rest`: words of the command line that are no flags.

    Flags and settings win over the file; the same option in both of them is refused. Raises ConfigError with
    all mistakes: each has its file and line (or flag), the wrong value, and the nearest valid name.
    """
    given = Given("command line" if file is None else str(file))
    readable = file is None or _read_file(file, given)
    for argument, text, meant in strays(rest):
        given.problems.append((argument, text))
        given.unread |= {meant} if meant else set()
    _take(given, dict(explicit(flags, settings, given)))
    config, wrong = validated(given)
    if readable:  # else all that the file says would be reported as missing
        for name, text in broken_rules(config, wrong | given.unread):
            given.problems.append((given.where((name,)), text))
    if given.problems:
        raise ConfigError([f"{where}: {text}" for where, text in sorted(given.problems, key=_line)])
    return resolved(config), given


def _line(problem: tuple[str, str]) -> int:
    """The line of a problem in the file; the command line's come last, in the order given."""
    number = problem[0].rpartition(":")[2]
    return int(number) if number.isdigit() else 1 << 30


def _read_file(file: Path, given: Given) -> bool:
    """Take the file's values; False when it is no configuration at all."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        given.problems.append(("--config", f"cannot read {file}: {getattr(error, 'strerror', None) or error}"))
        return False
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        text = (
            f'not YAML: {error.problem or error.context}; expected lines such as "lr: 1e-5" (see also the line before)'
        )
        given.problems.append((f"{file}:{line}", text))
        return False
    except yaml.YAMLError as error:
        given.problems.append((str(file), f"not YAML: {error}"))
        return False
    if node is None:
        return True
    if not isinstance(node, yaml.MappingNode):
        given.problems.append((f"{file}:{node.start_mark.line + 1}", 'expected lines such as "lr: 1e-5"'))
        return False
    given.values.update(_mapping(node, file, (), given))
    return True


def _mapping(node: yaml.MappingNode, file: Path, above: Place, given: Given) -> dict[str, Any]:
    """A mapping's values; notes the line of each value and refuses a key that stands twice."""
    values: dict[str, Any] = {}
    for key, value in node.value:
        name, place = str(key.value), (*above, str(key.value))
        line = f"{file}:{key.start_mark.line + 1}"
        if name in values:
            given.problems.append((line, f"{name} stands here and in {given.places[place]}"))
            continue
        given.places[place] = line
        if isinstance(value, yaml.MappingNode):
            values[name] = _mapping(value, file, place, given)
            continue
        if isinstance(value, yaml.SequenceNode):
            for index, item in enumerate(value.value):
                given.places[(*place, index)] = f"{file}:{item.start_mark.line + 1}"
        try:
            values[name] = _constructed(value)
        except (yaml.YAMLError, ValueError) as error:
            given.problems.append((line, f"a value that cannot be read: {getattr(error, 'problem', None) or error}"))
            given.unread.add(str(place[0]))
    return values


def _constructed(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def explicit(
    flags: Mapping[str, Any], settings: Sequence[str], given: Given
) -> Iterator[tuple[Place, tuple[str, Any]]]:
    """(place, (flag, value)) of everything given on the command line, each option once."""
    seen: dict[Place, str] = {}
    for name, value in flags.items():
        if value is not None and value != []:
            place: Place = (name, SHORT[name]) if name in SHORT else (name,)
            seen[place] = "--" + name.replace("_", "-")
            yield place, (seen[place], value)
    for setting in settings:
        name, sign, text = setting.partition("=")
        if not sign or not name.strip():
            given.problems.append(("--set", f"{setting!r} is not of the form name=value"))
            continue
        place = tuple(name.strip().split("."))
        where = f"--set {name.strip()}"
        rivals = (flag for other, flag in seen.items() if other[: len(place)] == place[: len(other)])
        rival = next(rivals, None)
        if rival is not None:
            given.problems.append((where, f"{rival} gives this option too: give it once"))
            continue
        seen[place] = where
        try:
            yield place, (where, yaml.safe_load(text))
        except yaml.YAMLError:
            yield place, (where, text)


def _take(given: Given, explicit: Mapping[Place, tuple[str, Any]]) -> None:
    """Put the command line's values over the file's."""
    for place, (where, value) in explicit.items():
        other = INSTEAD.get(str(place[0]))
        if other is not None and given.values.get(other) is not None and (other,) not in explicit:
            given.notes.append(f"{where} replaces {other} from {given.where((other,))}")
            del given.values[other]
        inner = given.values
        for name in place[:-1]:
            above = inner.get(str(name))
            if not isinstance(above, dict):
                inner[str(name)] = {SHORT[str(name)]: above} if name in SHORT and isinstance(above, str) else {}
            inner = inner[str(name)]
        inner[str(place[-1])] = value
        given.places = {old: line for old, line in given.places.items() if old[: len(place)] != place}
        given.places[place] = where


def validated(given: Given) -> tuple[RunConfig, set[str]]:
    """The configuration without its wrong values, and the names of the options they were for."""
    try:
        return RunConfig.model_validate(given.values), set()
    except ValidationError as error:
        wrong = {str(item["loc"][0]) for item in error.errors()}
        for name in wrong - set(RunConfig.model_fields):  # a misspelt option is not missing as well
            meant, likeness = nearest(name, list(RunConfig.model_fields))
            given.unread |= {meant} if likeness >= NEAR else set()
        told: set[tuple[str, str]] = set()
        for item in error.errors():
            problem = (given.where(tuple(item["loc"])), _explained(tuple(item["loc"]), dict(item)))
            if problem not in told:
                told.add(problem)
                given.problems.append(problem)
        return RunConfig.model_validate(
            {name: value for name, value in given.values.items() if name not in wrong}
        ), wrong


def _explained(place: Place, item: dict[str, Any]) -> str:
    """One of pydantic's findings in our words: option, wrong value, what would be right."""
    name = ".".join(str(part) for part in place if isinstance(part, str))
    kind, context = str(item["type"]), item.get("ctx", {})
    if kind == "extra_forbidden":
        names = list((RunConfig if len(place) == 1 else SECTIONS[str(place[0])]).model_fields)
        return unknown(name, str(place[-1]), names)
    value = f"{name} = {item['input']!r}"
    if kind == "value_error":
        return f"{value} {context['error']}"
    if kind == "literal_error":
        choices = _choices(place)
        near, likeness = nearest(str(item["input"]), choices)
        return f"{value} is not one of {', '.join(choices)}" + (f"; nearest: {near}" if likeness >= NEAR else "")
    texts = {
        "int": "is not a whole number", "float": "is not a number", "finite": "is not a finite number",
        "bool": "is not true or false", "string": "is not text (put it in quotes)",
        "greater_than_equal": f"is too small: at least {context.get('ge')}",
        "greater_than": f"is too small: more than {context.get('gt')}",
        "less_than": f"is too large: less than {context.get('lt')}",
        "tuple": "is not a list", "too_": f"has {context.get('actual_length')} entries",
        "dict": "is not of the form {name: value}", "missing": "has too few entries: two are needed",
        "model": FORMS.get(name, ""),
    }  # fmt: skip
    told = next((text for start, text in texts.items() if kind.startswith(start)), str(item["msg"]))
    return f"{value} {told}"


def _choices(place: Place) -> list[str]:
    fields = (RunConfig if len(place) == 1 else SECTIONS[str(place[0])]).model_fields
    return list(get_args(fields[str(place[len(place) > 1])].annotation))
