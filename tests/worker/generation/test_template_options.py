"""Options of a chat template, per record and for all, and what a template leaves out of a
prompt.
"""

from __future__ import annotations

from typing import Any

import pytest

from smtrain.core.errors import CheckpointError, ConfigError, DataError
from smtrain.core.model.chat_options import read_options
from smtrain.worker.generation.conversation import (
    ignored_in,
    record_options,
    set_template,
    text_of,
    unwritten_parts,
)
from smtrain.worker.generation.load import LoadedModel
from tests.worker.data.chats import talk, tokenizer

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% if short %}short {% endif %}{%"
    " for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content.split('</think>')[-1]"
    " }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    from transformers import AutoTokenizer

    folder = tokenizer(tmp_path_factory.mktemp("tok"), None)
    (folder / "own.jinja").write_text(TEMPLATE)
    words: Any = AutoTokenizer.from_pretrained(folder)
    made = LoadedModel(folder, None, words)
    set_template(made, folder / "own.jinja", {"short": True, "lang": "de"})
    return made


def test_options_of_a_record_win_over_those_for_all(loaded: LoadedModel) -> None:
    asked: Any = talk("hi")
    assert text_of(loaded, asked) == "short user: hi\nassistant: "
    record = {
        "chat_template_kwargs": {"short": False},
        "functions": [{"name": "now"}],
        "messages": asked,
    }
    assert text_of(loaded, asked, record_options(record, 1)) == "now user: hi\nassistant: "
    assert ignored_in(loaded) == "the chat template does not read lang of chat_template_kwargs"
    with pytest.raises(DataError, match="prompt 3: 'chat_template_kwargs' is text and not JSON"):
        record_options({"chat_template_kwargs": "short"}, 3)


def test_what_the_template_does_not_write_of_a_prompt_is_named(loaded: LoadedModel) -> None:
    asked: Any = talk("two?", "<think>one and one</think>two", "and?", system="be brief")
    record = {"enable_thinking": False, "tools": [{"name": "now", "description": "the time"}]}
    assert unwritten_parts(loaded, asked, record_options(record, 1)) == [
        "enable_thinking",
        "parts of tools",
        "parts of turns of the role system",
        "parts of turns of the role assistant",
    ]
    assert unwritten_parts(loaded, talk("two?"), {}) == []  # type: ignore[arg-type]


def test_a_conversation_that_is_refused_names_the_ways_out(loaded: LoadedModel) -> None:
    with pytest.raises(
        CheckpointError, match=r"change its turns, or name another template with --template FILE"
    ):
        text_of(loaded, [{"role": "user"}])


@pytest.mark.parametrize("text", ["{", "[]", "1", '{"tools": []}'])
def test_typed_options_are_an_object_of_options(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--chat-template-kwargs"):
        read_options("--chat-template-kwargs", text)
    assert read_options("--chat-template-kwargs", '{"enable_thinking": false}') == {
        "enable_thinking": False
    }
