"""`headrace train --list`: every option of a run with its type, its default and its meaning."""

from __future__ import annotations

from typing import Any

from headrace.cli.config import FLAGS, SECTIONS, RunConfig, helps
from headrace.cli.flags import METAVARS

# Where an option takes more than its type says: sizes as text, a fraction or paths, a nested mapping.
_KINDS = {
    "activations": "auto | WAY | {BLOCK: WAY, ...}", "chat_template": "FILE", "data": "list of PATH|ID",
    "headroom": "PART | SIZE", "log": "FILE",
    "lora": "{r: N, alpha: NUMBER, ...}", "placement": "auto | {weights: TIER, state: TIER, ...}",
    "placement.weights": "TIER | {BLOCK: TIER, ...}", "placement.state": "TIER | {BLOCK: TIER, ...}",
    "quantize": "CODEC | {codec: CODEC, ...}", "validation": "FRACTION | list of PATH",
}  # fmt: skip
_TYPES = {"string": "TEXT", "boolean": "true | false", "integer": "whole number", "number": "number", "null": "null"}


def listing() -> str:
    """Two lines for each option: `name  type  default`, and what it means."""
    fields: dict[str, dict[str, Any]] = RunConfig.model_json_schema()["properties"]
    texts = helps()
    lines = [
        'Every option of `headrace train`. Write "name: value" in the file that --config names, or --set name=value;',
        "those marked with * are flags as well, as in --sequence-length 512.",
    ]
    for name, field in fields.items():
        kind = _KINDS.get(name) or METAVARS.get(name) or _kind(field)
        kind = kind.removesuffix(" | null") if field["default"] is None else kind  # leaving it out says the same
        default = _shown(RunConfig.model_fields[name].default)
        lines += ["", f"{name}{'*' * (name in FLAGS)}  ({kind}; {default})", f"    {' '.join(texts[name].split())}"]
        lines += _inner(name)
    return "\n".join(lines)


def _inner(section: str) -> list[str]:
    """The options inside an option that explain themselves."""
    fields = SECTIONS[section].model_fields if section in SECTIONS else {}
    told = {name: field for name, field in fields.items() if field.description}
    schema = SECTIONS[section].model_json_schema()["properties"] if told else {}
    return [
        line
        for name, field in told.items()
        for line in (f"    {section}.{name}  ({_KINDS.get(f'{section}.{name}') or _kind(schema[name])}; "
                     f"{_shown(field.default)})",
                     f"        {' '.join(str(field.description).split())}")
    ]  # fmt: skip


def _kind(field: dict[str, Any]) -> str:
    """A type and its limits, from a JSON schema."""
    if "anyOf" in field:
        return " | ".join(_kind(part) for part in field["anyOf"])
    if "enum" in field or "const" in field:
        return " | ".join(field.get("enum") or [field["const"]])
    if field.get("type") == "object":
        return "{NAME: TEXT, ...}"
    if "items" in field:
        return "list of TEXT"
    if "prefixItems" in field:
        return "[" + ", ".join(_kind(part) for part in field["prefixItems"]) + "]"
    signs = {"minimum": "at least", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
    limits = [f"{text} {field[sign]}" for sign, text in signs.items() if sign in field]
    return " ".join([_TYPES[field["type"]], *limits])


def _shown(default: Any) -> str:
    if default in (None, (), {}, ""):
        return "no default"
    if isinstance(default, bool):
        return f"default {str(default).lower()}"
    if isinstance(default, tuple):
        return f"default [{', '.join(map(str, default))}]"
    return f"default {default if isinstance(default, (int, float, str)) else 'auto'}"
