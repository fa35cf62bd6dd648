"""Conversations: which tokens of them are trained, through templates of every habit (reports 91, 92 and 95)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cpu.test_data_samples import write_jsonl
from headrace.base.errors import DataError
from headrace.data.broken import Broken
from headrace.data.counts import Counts
from headrace.data.encode import Encoded, Encoder
from headrace.data.prepare import Shape, prepare
from headrace.data.rows import read_row
from headrace.data.table import TokenTable
from headrace.data.turns import Chat

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>", "<|return|>", "[INST]", "[/INST]"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_WITHOUT_END = MARKED.replace("'<|im_end|>' }}{% endgen", "'' }}{% endgen").replace(
    "{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}"
)
MARKED_IN_TWO = MARKED.replace("m.content + '<|im_end|>' }}{% endgen", "m.content }}{% endgen").replace(
    "{% endgeneration %}", "{% endgeneration %}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"
)
INSTRUCT = (  # no generation prompt, begin token, system turn inside the first user turn
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
CLOSING = (  # an end token behind the last turn only, behind the end-of-turn token
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
REWRITING = (  # reasoning of the last turn only, and an end of its own
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>' + (m.reasoning or '') + '</think>' + m.content + '<|return|>' }}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NEXT_TURN_ENDS = (  # a turn ends with the token that begins the next
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def chat_tokenizer(template: str | None, begin: bool = False, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """Byte-level, every text encodes; `begin`: adds a begin token by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", extra_special_tokens=SPECIAL
    )
    made.chat_template = template
    return made


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """User and assistant in turn, after a system turn if there is one."""
    made = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system is not None else []) + made


def chat(row: dict[str, Any]) -> Chat:
    read = read_row(row, "rows.jsonl:1")
    assert isinstance(read, Chat), read
    return read


def encoded(tokenizer: Any, row: dict[str, Any]) -> list[Encoded]:
    found = list(Encoder(tokenizer, 1000).encode([chat(row)]))
    assert all(isinstance(item, Encoded) for item in found), found
    return [item for item in found if isinstance(item, Encoded)]


def refusal(tokenizer: Any, row: dict[str, Any]) -> str:
    (found,) = Encoder(tokenizer, 1000).encode([chat(row)])
    assert isinstance(found, Broken) and found.where == "rows.jsonl:1"
    return found.reason


def trained(tokenizer: Any, row: Encoded) -> list[str]:
    """The texts of a row that are trained."""
    assert row.spans is not None
    return [tokenizer.decode(row.ids[start:stop]) for start, stop in row.spans]


TALKS = {
    "one": turns("Hi", "Hello."),
    "two": turns("Hi", "A", "More?", "Yes, more."),
    "three": turns("é", "ü ß", "2 + 2", "4", "and\nlines", "a\n\nb"),
    "system": turns("Hi", "Hello.", "And?", "No.", system="Be brief."),
}
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"), "instruct": (INSTRUCT, "</s>"), "closing": (CLOSING, "<|end|>"),
    "marked": (MARKED, "<|im_end|>"), "marked without end": (MARKED_WITHOUT_END, "<|im_end|>"),
    "marked in two": (MARKED_IN_TWO, "<|im_end|>"),
}  # fmt: skip


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_assistant_turn_is_trained_with_its_end_and_nothing_else(name: str, talk: str) -> None:
    """Report 91. Each trained span begins where the prompt of its turn ends, token for token."""
    template, end = TEMPLATES[name]
    tokenizer, messages = chat_tokenizer(template), TALKS[talk]
    (row,) = encoded(tokenizer, {"messages": messages})
    assert row.ids == tokenizer.apply_chat_template(messages)["input_ids"]
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    space = " " if name == "instruct" else ""
    assert trained(tokenizer, row) == [space + messages[place]["content"] + end for place in answers]
    assert row.spans is not None
    for place, (start, _) in zip(answers, row.spans, strict=True):
        prompt = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True)
        assert row.ids[:start] == prompt["input_ids"]
    assert not (row.apart or row.closed or row.parted)


def test_marks_are_those_of_transformers() -> None:
    tokenizer, messages = chat_tokenizer(MARKED), TALKS["three"]
    (row,) = encoded(tokenizer, {"messages": messages})
    theirs = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
    assert row.spans is not None
    ours = [int(any(start <= place < stop for start, stop in row.spans)) for place in range(len(row.ids))]
    assert (row.ids, ours) == (theirs["input_ids"], theirs["assistant_masks"])


def test_turns_that_the_template_rewrites_are_trained_as_the_model_will_write_them() -> None:
    """Qwen3 and gpt-oss strip reasoning from earlier turns: each turn gets a row, its own prompt and answer."""
    tokenizer = chat_tokenizer(REWRITING)
    messages = turns("Hi", "A", "More?", "B")
    messages[1]["reasoning"], messages[3]["reasoning"] = "Hm.", "So."
    last, first = encoded(tokenizer, {"messages": messages})
    assert trained(tokenizer, last) == ["<think>So.</think>B<|return|>"]
    assert trained(tokenizer, first) == ["<think>Hm.</think>A<|return|>"]
    assert last.ids == tokenizer.apply_chat_template(messages)["input_ids"]
    assert first.ids == tokenizer.apply_chat_template(messages[:2])["input_ids"]
    assert (last.apart, first.apart) == (False, True)


def test_all_end_tokens_that_stand_together_belong_to_the_turn() -> None:
    """As behind calls of tools. What stands apart from them, as the last turn's extra end token, does not."""
    template = CLOSING.replace("'<|end|>\n'", "'<|end|><|return|>\n'")
    tokenizer = chat_tokenizer(template)
    (row,) = encoded(tokenizer, {"messages": TALKS["two"]})
    assert trained(tokenizer, row) == ["A<|end|><|return|>", "Yes, more.<|end|><|return|>"]
    assert tokenizer.decode(row.ids).endswith("<|return|>\n</s>")


def test_one_token_replies_and_a_last_turn_of_the_user() -> None:
    tokenizer = chat_tokenizer(CHATML)
    (row,) = encoded(tokenizer, {"messages": turns("Hi", "x", "Thanks")})
    assert trained(tokenizer, row) == ["x<|im_end|>"]


def test_a_turn_that_ends_with_the_beginning_of_the_next_learns_to_end() -> None:
    """And the last one, behind which nothing comes, gets an end token, counted."""
    tokenizer = chat_tokenizer(NEXT_TURN_ENDS)
    (row,) = encoded(tokenizer, {"messages": turns("Hi", "A", "More?", "B")})
    assert trained(tokenizer, row) == ["A<|user|>", "B</s>"] and row.closed
    (row,) = encoded(tokenizer, {"messages": turns("Hi", "A", "More?")})
    assert trained(tokenizer, row) == ["A<|user|>"] and not row.closed


@pytest.mark.parametrize("begin", [False, True], ids=["tokenizer adds none", "tokenizer adds one"])
@pytest.mark.parametrize("template", [CHATML, INSTRUCT], ids=["template writes none", "template writes one"])
def test_the_template_owns_the_begin_token(template: str, begin: bool) -> None:
    """Report 92: as many begin tokens as the template writes, as when the model is asked; none is trained."""
    tokenizer = chat_tokenizer(template, begin)
    (row,) = encoded(tokenizer, {"messages": TALKS["two"]})
    assert row.ids.count(0) == (template is INSTRUCT) and row.ids == row.ids[:1] + [i for i in row.ids[1:] if i]
    assert not any("<s>" in text for text in trained(tokenizer, row))


def test_a_token_that_would_cross_the_border_of_a_turn() -> None:
    """The prompt is encoded as it will be when the model is asked: "ab" may not become one token across it."""
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    tokenizer = chat_tokenizer(template, merges=(("a", "b"),))
    a, b, ab = tokenizer.convert_tokens_to_ids(["a", "b", "ab"])
    (row,) = encoded(tokenizer, {"messages": turns("xa", "bab", "a", "a")})
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert row.ids[1:] == [a, b, ab, end, a, a, end] and row.spans == ((2, 5), (6, 8)) and row.parted


def test_tokenizers_without_offsets_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer(CHATML)
    fast = encoded(tokenizer, {"messages": TALKS["three"]})
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert encoded(tokenizer, {"messages": TALKS["three"]}) == fast and not fast[0].parted


REFUSED = {
    "another beginning": (
        CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif"), TALKS["one"],
        "writes turn 2 ('Hello.<|im_end|>\\n') in another way than its generation prompt begins it ('<think>')",
    ),
    "no generation prompt": (
        CHATML.split("{% if add")[0], TALKS["one"], "has no generation prompt, so the beginning of turn 2 is unknown",
    ),
    "system unknown": (
        INSTRUCT.replace("system if loop.first else ''", "''"), TALKS["system"],
        "leaves out the content of turn 1 (system)",
    ),
    "roles alternate": (INSTRUCT, [*turns("Hi"), *turns("x", "A")], "refuses it (TemplateError: roles must alternate"),
    "reasoning unknown": (
        CHATML, [*turns("Hi"), {"role": "assistant", "content": "A", "reasoning_content": "Hm."}],
        "leaves out the reasoning_content of turn 2",
    ),
    "calls unknown": (
        CHATML, [*turns("Hi"), {"role": "assistant", "tool_calls": [{"function": {"name": "weather"}}]}],
        "leaves out the tool call of turn 2",
    ),
    "assistant first": (CHATML, turns("Hi", "A")[1:], "begins with an assistant turn"),
    "marks nothing": (MARKED.replace("'assistant'", "'model'", 1), TALKS["one"], "marks nothing of it"),
    "not a template": ("{{ oops(", TALKS["one"], "refuses it (TemplateSyntaxError"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused_with_its_reason(name: str) -> None:
    """Never a guess, never a whole row trained or masked."""
    template, messages, reason = REFUSED[name]
    assert reason in refusal(chat_tokenizer(template), {"messages": messages})


def test_weights_and_prompts_choose_the_turns() -> None:
    tokenizer, messages = chat_tokenizer(CHATML), turns("Hi", "A", "More?", "B", "End?", "C")
    weighted = [dict(message) for message in messages]
    weighted[1]["weight"], weighted[3]["weight"] = 0, 1
    (row,) = encoded(tokenizer, {"messages": weighted})
    assert trained(tokenizer, row) == ["B<|im_end|>", "C<|im_end|>"]
    assert row.ids == tokenizer.apply_chat_template(messages)["input_ids"]
    (row,) = encoded(tokenizer, {"prompt": messages[:3], "completion": messages[3:]})
    assert trained(tokenizer, row) == ["B<|im_end|>", "C<|im_end|>"]
    marked = encoded(chat_tokenizer(MARKED), {"messages": weighted})
    assert marked == [row]


def test_sharegpt_turns_text_parts_and_empty_system_turns() -> None:
    talk = [
        {"from": "system", "value": ""}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."},
    ]  # fmt: skip
    expected = turns("Hi", "Hello.", system="")
    mapped = chat({"conversations": talk})
    assert mapped.messages == expected and mapped.mapped and mapped.trained == (2,)
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, *expected[2:]]
    assert chat({"messages": parts}).messages == expected[1:]
    assert not chat({"messages": expected}).mapped


def test_tools_reach_the_template() -> None:
    template = "{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML.replace(
        "m.content +", "m.content + (m.tool_calls[0].function.name if m.tool_calls else '') +"
    )
    tokenizer = chat_tokenizer(template)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [*turns("Hi"), call, {"role": "tool", "content": "7"}, *turns("", "Seven.")[1:]]
    for tools in ([{"name": "f"}], '[{"name": "f"}]'):
        (row,) = encoded(tokenizer, {"messages": messages, "tools": tools})
        assert trained(tokenizer, row) == ["f<|im_end|>", "Seven.<|im_end|>"]
        assert tokenizer.decode(row.ids).startswith("f<|im_start|>user\nHi")


WRONG = [
    ({"messages": "Hi"}, '"messages" is text instead of a list of turns'),
    ({"messages": []}, '"messages" is empty'),
    ({"messages": ["Hi"]}, 'turn 1 of "messages" is text instead of an object'),
    ({"messages": turns("Hi")}, '"messages" has no assistant turn to train on'),
    ({"messages": [{"role": "user", "text": "Hi"}]}, 'turn 1 of "messages" has no "content"'),
    ({"messages": [{"content": "Hi"}]}, 'has no "role" (fields: content)'),
    ({"messages": [{"role": "gpt", "content": "Hi"}]}, "has the role 'gpt'; known: system"),
    ({"messages": [*turns("Hi"), {"role": "assistant", "content": " "}]}, 'turn 2 of "messages" cannot be used'),
    ({"messages": [{"role": "user", "content": 7}]}, 'has a number as "content"'),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "holds a part that is no text (image)"),
    ({"messages": [*turns("Hi"), {"role": "assistant", "content": "A", "weight": 0.5}]}, "has the weight 0.5"),
    ({"messages": [*turns("Hi"), {"role": "assistant", "content": "A", "weight": 0}]}, "no assistant turn to train on"),
    ({"conversations": [{"from": "alien", "value": "Hi"}]}, "is from 'alien'; known: system, human"),
    ({"prompt": turns("Hi"), "completion": "A"}, '"completion" is text instead of a list of turns'),
    ({"prompt": turns("Hi", "A"), "completion": turns("x")}, '"completion" has no assistant turn'),
    ({"messages": turns("Hi", "A"), "tools": "x"}, '"tools" is text, and no JSON'),
    ({"messages": turns("\ud800", "A")}, "holds half a character"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), WRONG, ids=[str(place) for place in range(len(WRONG))])
def test_wrong_conversations_are_named_with_an_accepted_example(row: dict[str, Any], reason: str) -> None:
    """Reports 93 and 95."""
    found = read_row(row, "rows.jsonl:7")
    assert isinstance(found, Broken) and found.where == "rows.jsonl:7"
    assert reason in found.reason and found.reason.endswith('{"role": "assistant", "content": "..."}]}')


def prepared(folder: Path, rows: list[Any], template: str | None = CHATML, **shape: Any) -> tuple[TokenTable, Counts]:
    path = write_jsonl(folder / "rows.jsonl", rows)
    return prepare([path], Encoder(chat_tokenizer(template), 1000), Shape(**{"sequence_length": 99, **shape}), folder)


def test_a_tokenizer_without_chat_template_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no chat template.*rows\.jsonl:1 holds a conversation.*chat_template=FILE"):
        prepared(tmp_path, [{"messages": TALKS["one"]}], None)


def test_counts_and_example(tmp_path: Path) -> None:
    share = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hey"}]}
    rows = [{"messages": TALKS["one"]}, share, {"messages": TALKS["two"]}, {"prompt": "a", "completion": "b"}]
    table, counts = prepared(tmp_path, rows, REWRITING)
    assert (counts.conversations, counts.mapped, counts.pairs, counts.apart) == (3, 1, 1, 1)
    assert len(table) == counts.kept == 5 and counts.rows == 4
    head = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert counts.example == head + ">>><think></think>Hello.<|return|><<<\n"
    assert "3 conversations; 1 of them in from/value form; 1 turn in a row of its own" in str(counts)


def test_broken_conversations_are_counted_wherever_they_are_found(tmp_path: Path) -> None:
    """Some faults show in the row, some only in its template; one message tells all, also beyond the first group."""
    good, headless = {"messages": TALKS["one"]}, {"messages": turns("Hi", "A")[1:]}
    rows = [good, {"messages": []}, headless, *[good] * 300, headless]
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, rows)
    text = str(caught.value)
    assert "3 of 304 rows are broken" in text
    assert all(f"rows.jsonl:{line}:" in text for line in (2, 3, 304))
    table, counts = prepared(tmp_path, rows, broken_rows="skip")
    assert len(table) == 301 and counts.broken == 3


@pytest.mark.parametrize(
    ("policy", "length", "kept", "cut", "dropped", "unlabelled"),
    [("drop", 60, 1, 0, 1, 0), ("cut", 60, 2, 1, 0, 0), ("cut", 35, 1, 0, 0, 1)],
)
def test_long_conversations(
    tmp_path: Path, policy: str, length: int, kept: int, cut: int, dropped: int, unlabelled: int
) -> None:
    """Report 90: cut behind the second question one answer is left, cut before the first none."""
    rows = [{"messages": turns("Hi" * 10, "A", "More?", "B" * 9)}, {"messages": turns("a", "b")}]
    table, counts = prepared(tmp_path, rows, long_rows=policy, sequence_length=length)
    assert (counts.kept, counts.cut, counts.dropped, counts.unlabelled) == (kept, cut, dropped, unlabelled)
    if cut:
        ((ids, marks),) = table.row(0)
        whole = chat_tokenizer(CHATML).apply_chat_template(rows[0]["messages"])["input_ids"]
        assert ids.tolist() == whole[:length] and marks.sum() == 2
    with pytest.raises(DataError, match=r"1 row is longer.*rows\.jsonl:1 \(\d+ tokens\)"):
        prepared(tmp_path, rows, sequence_length=length)


def test_the_date_of_a_template_does_not_change_the_data(tmp_path: Path) -> None:
    """Else a run could not go on the next day."""
    template = "{{ strftime_now('%Y-%m-%d') }}" + CHATML
    tokenizer = chat_tokenizer(template)
    (row,) = encoded(tokenizer, {"messages": TALKS["one"]})
    assert tokenizer.decode(row.ids).startswith("2024-07-26<|im_start|>")
    _, counts = prepared(tmp_path, [{"messages": TALKS["one"]}], template)
    assert "date is always 2024-07-26" in str(counts)
