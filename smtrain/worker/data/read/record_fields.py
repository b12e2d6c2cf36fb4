"""The table of all fields that a record of instruction data may have: origin and use.

docs/sft.md shows it, `turns` and `chat` read their names from it, and a test tries every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Use = Literal["prompt", "learned", "decides", "option", "counted", "columns", "refused"]
USES: dict[Use, str] = {
    "prompt": "seen, not learned",
    "learned": "learned",
    "decides": "decides what is learned",
    "option": "a value for the chat template; counted and named if it reads no such value",
    "counted": "not read; counted and named",
    "columns": "read under the name that `data.columns` gives it, else counted",
    "refused": "the record is refused",
}
_TURN = "[]."
"""Separates a list of turns from a field of each turn."""


@dataclass(frozen=True)
class RecordField:
    """Fields of one meaning in the form `origin`; `messages[].x` is the field x of a turn."""

    origin: str
    names: tuple[str, ...]
    use: Use
    meaning: str


PAIRS = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
"""Names of the better answer and the worse one in preference data."""
ANSWER_LABELS = ("kto_tag", "label")
"""Fields that say by `false` that an answer is not wanted."""
MEDIA_FIELDS = ("images", "videos", "audios", "image", "audio")
"""Fields that a model of text cannot read."""
_NO_TEXT = "the model reads text only, and would learn answers about media that it cannot see"
FIELDS: tuple[RecordField, ...] = (
    RecordField(
        "alpaca",
        ("instruction", "input"),
        "prompt",
        "the question; `input` follows after an empty line",
    ),
    RecordField("alpaca", ("output",), "learned", "the answer"),
    RecordField(
        "alpaca",
        ("text",),
        "counted",
        "the other three in one; only text that they do not have is lost",
    ),
    RecordField(
        "LLaMA-Factory", ("system",), "prompt", "the system prompt, also of turns that have none"
    ),
    RecordField(
        "LLaMA-Factory",
        ("history",),
        "learned",
        "earlier turns, pairs of question and answer, all learned",
    ),
    RecordField(
        "LLaMA-Factory", ("tools",), "prompt", "functions, as a list or as JSON in a string"
    ),
    RecordField("LLaMA-Factory", MEDIA_FIELDS, "refused", _NO_TEXT),
    RecordField(
        "LLaMA-Factory", PAIRS[0], "refused", "a pair; learned if `data.columns` names one"
    ),
    RecordField(
        "LLaMA-Factory",
        ANSWER_LABELS,
        "refused",
        "if `false`: the answer is not wanted; `true` is learned",
    ),
    RecordField(
        "ShareGPT",
        ("conversations",),
        "learned",
        "turns; `role` and `content` in place of the next two also",
    ),
    RecordField(
        "ShareGPT",
        ("conversations[].from",),
        "prompt",
        "human, gpt, system, tool; of LLaMA-Factory also observation (a tool's answer) and"
        " function_call (learned)",
    ),
    RecordField(
        "ShareGPT",
        ("conversations[].value",),
        "learned",
        "the text; learned if gpt or function_call says it",
    ),
    RecordField("ShareGPT", ("id",), "counted", "a name of the record"),
    RecordField(
        "OpenAI",
        ("messages",),
        "learned",
        "turns; `from` and `value` in place of the next two also",
    ),
    RecordField(
        "OpenAI",
        ("messages[].role",),
        "prompt",
        "system, user, assistant, tool; developer is system, and function is tool, to a template"
        " without them",
    ),
    RecordField(
        "OpenAI",
        ("messages[].content",),
        "learned",
        "text, or parts of text; an image or sound is refused",
    ),
    RecordField("OpenAI", ("messages[].weight",), "decides", "0: this answer is seen, not learned"),
    RecordField(
        "OpenAI",
        ("messages[].tool_calls", "messages[].function_call"),
        "learned",
        "calls of an answer, their arguments read if they are JSON in a string; refused if the"
        " template has no calls",
    ),
    RecordField(
        "OpenAI",
        ("messages[].name", "messages[].tool_call_id", "messages[].refusal"),
        "prompt",
        "given to the template; counted if it does not write it, as any other field of a turn",
    ),
    RecordField("OpenAI", ("functions",), "prompt", "`tools` as they once were called"),
    RecordField("OpenAI", ("parallel_tool_calls",), "counted", "a setting of the service"),
    RecordField("OpenAI", PAIRS[1], "refused", "a pair of preferences"),
    RecordField(
        "OpenAI", ("prompt", "completion"), "columns", "`{instruction: prompt, output: completion}`"
    ),
    RecordField(
        "axolotl",
        ("conversations[].train", "messages[].train"),
        "decides",
        "false: seen, not learned",
    ),
    RecordField(
        "axolotl",
        ("messages[].train_detail",),
        "refused",
        "parts of a turn; say `train` of the whole turn",
    ),
    RecordField(
        "axolotl",
        ("messages[].reasoning_content",),
        "prompt",
        "as `name`; the template makes it a thought",
    ),
    RecordField(
        "axolotl",
        ("roles_to_train", "train_on_eos"),
        "counted",
        "settings of its config: here the assistant's answers are learned with the token that ends"
        " them",
    ),
    RecordField(
        "axolotl",
        (
            "question",
            "answer",
            "response",
            "system_prompt",
            "generation",
            "message_1",
            "message_2",
            "INSTRUCTION",
            "RESPONSE",
            "article",
            "summary",
            "solution",
            "explanation",
            "revision",
        ),
        "columns",
        "such as `{instruction: question, output: answer, system: system_prompt}`",
    ),
    RecordField(
        "axolotl",
        (
            "category",
            "choices",
            "context",
            "reflection",
            "corrected",
            "critiques",
            "scores",
            "unanswerable_question",
            "segments",
        ),
        "counted",
        "no answers of a conversation; text in `segments` is spelled already, so write turns in its"
        " place",
    ),
    RecordField("ms-swift", ("messages[].loss",), "decides", "false: seen, not learned"),
    RecordField("NeMo", ("mask", "type"), "counted", "here the assistant's answers are learned"),
    RecordField(
        "TRL",
        ("chat_template_kwargs",),
        "option",
        "an object of such values, or JSON in a string; they win over the next row and"
        " `model.chat_template_kwargs`",
    ),
    RecordField(
        "Transformers",
        (
            "enable_thinking",
            "thinking",
            "preserve_thinking",
            "clear_thinking",
            "thinking_budget",
            "reasoning_effort",
            "documents",
            "builtin_tools",
            "date_string",
        ),
        "option",
        "as arguments of `apply_chat_template`; of another type they are counted",
    ),
    RecordField(
        "any", ("weight", "train", "loss"), "counted", "of a whole record; of a turn they decide"
    ),
)


def record_fields(*uses: Use) -> tuple[str, ...]:
    """The names of the fields of a record that have one of these uses, each once."""
    return tuple(
        dict.fromkeys(n for f in FIELDS if f.use in uses for n in f.names if _TURN not in n)
    )


def turn_fields(*uses: Use) -> tuple[str, ...]:
    """The names of the fields of a turn that have one of these uses, each once."""
    return tuple(
        dict.fromkeys(
            n.partition(_TURN)[2] for f in FIELDS if f.use in uses for n in f.names if _TURN in n
        )
    )


def objective_of(record: Mapping[str, Any]) -> Literal["pretrain", "sft", "dpo"]:
    """The objective that learns from a record with these fields; pretrain if it has `text`."""
    present = {name for name, value in record.items() if value is not None}
    if any(present.issuperset(pair) for pair in PAIRS):
        return "dpo"
    is_talk = not present.isdisjoint(("messages", "conversations", "instruction"))
    return "sft" if is_talk and "text" not in present else "pretrain"


def objective_remedy(record: Mapping[str, Any], objective: str) -> str:
    """`; set train.objective: sft` if another objective than this one learns from the record, else
    empty.
    """
    right_objective = objective_of(record)
    is_known = right_objective != "pretrain" or isinstance(record.get("text"), str)
    is_another = right_objective != objective and is_known
    return f"; set train.objective: {right_objective}" if is_another else ""
