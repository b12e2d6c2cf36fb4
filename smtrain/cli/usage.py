"""Explain a wrong command line: the unknown word, and the nearest known one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

from smtrain.core.facts import table
from smtrain.core.suggest import hint, nearest

_KEY = re.compile(r"[a-z_]+(\.\w+)+")
_CONFIG_OPTIONS = {"--config", "--file", "--yaml", "--config-file", "-c"}
_FOLDER_OPTIONS = {"out", "output", "to", "dir", "folder", "dest", "output-dir"}
_NUMBERS = re.compile(r"unable to parse|is not a valid (int|float|integer)")


def unknown_command(argv: list[str], commands: Iterable[str]) -> str:
    """Say that a first word is no command, with the likely one."""
    word, names = argv[0], table("word_names")["commands"]
    if word.lower().endswith((".yaml", ".yml")):
        return f"no command {word!r}; did you mean `smtrain run {word}`?"
    meant = nearest(word, commands, cutoff=1) or nearest(word, names, names, cutoff=1)
    meant = (
        meant or nearest(word, commands, cutoff=0.75) or nearest(word, names, names, cutoff=0.75)
    )
    meant = meant or nearest(word, commands)
    hint_ = f"did you mean `smtrain {meant}`?" if meant else "`smtrain --help` lists the commands"
    return f"no command {word!r}; {hint_}"


def sentence_of(error: Any, name: str, argv: list[str]) -> str:
    """Say what is wrong with a command's words, from the error of the parser.

    Args:
        error: The parser's own exception, which has `format_message`.
        name: The command as it was called, `smtrain data`.
        argv: The words after it.
    """
    from smtrain.core.config.secrets import hide

    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", None) or name
    text = " ".join(error.format_message().split()).rstrip(".").replace(": Value error,", ":")
    text = (
        text.replace(": Input should", ": it should").replace("argument(s)", "argument")
        or "a subcommand is missing"
    )
    sentence = hide(_improve_sentence(error, context, path, text, argv) or text)
    end = "" if sentence.endswith("?") else ";"
    return f"{path}: {sentence[0].lower()}{sentence[1:]}{end} `{path} --help` shows its arguments"


def _improve_sentence(
    error: Any, context: Any, path: str, text: str, argv: list[str]
) -> str | None:
    """The parser's sentence with the likely word; None if there is nothing to add."""
    if (option := getattr(error, "option_name", None)) and type(error).__name__ == "NoSuchOption":
        return f"no such option: {option}{_option_meant(str(option), context, path, argv)}"
    if match := re.fullmatch(r"No such command '(.*?)'\.?.*", text):
        commands = context.command.list_commands(context)
        return f"no such command '{match[1]}'{_subcommand_meant(match[1], commands, path)}"
    if match := re.match(r"(.*): '([^']*)' is not one of (.*)", text):
        choices = re.findall(r"'([^']*)'", match[3])
        return (
            f"{match[1]}: got {match[2]!r};"
            f" {hint(match[2], choices, table('word_names')['values'])}"
        )
    if match := re.match(r"Got unexpected extra argument \((.*)\)", text):
        return text + _extra_meant(match[1], context, argv)
    if (match := re.match(r"(Invalid value for '(-[\w-]+)'.*?): ", text)) and _NUMBERS.search(text):
        return f"{match[1]}: got {_typed_value(match[2], argv)!r}; a number is needed"
    return None


def _option_meant(option: str, context: Any, path: str, argv: list[str]) -> str:
    params = context.command.get_params(context) if context else []
    options = [
        name
        for param in params
        for name in (*param.opts, *param.secondary_opts)
        if name.startswith("-")
    ]
    arguments = [param for param in params if not param.opts[0].startswith("-")]
    argument_names = {str(param.metavar or param.name).strip("[].").upper() for param in arguments}
    word = option.lstrip("-").partition("=")[0]
    argument_name = "CONFIG" if option in _CONFIG_OPTIONS else word.upper()
    if (
        argument_name not in argument_names
        and word in _FOLDER_OPTIONS
        and "FOLDER" in argument_names
    ):
        argument_name = "FOLDER"
    if argument_name in argument_names:
        return f"; {argument_name} is given without an option, `{path} {argument_name}`"
    suggestion = nearest(option, [name for name in options if len(name) > 2], cutoff=0.75)
    if suggestion is None and "--set" in options and (key := _key_meant(word)):
        return (
            f"; a key of the config is set with --set {key}={_typed_value(option, argv) or 'VALUE'}"
        )
    completions = [name for name in options if len(word) > 2 and name.startswith(f"--{word}")]
    completions = completions or [
        name for name in options if f"--{word}".startswith(f"{name}-") and len(name) > 4
    ]
    suggestion = " or ".join(completions) or suggestion or _only_option_with(word, options)
    suggestion = suggestion or nearest(
        word, [name[2:] for name in options if name[:2] == "--" and name != "--help"], cutoff=0.7
    )
    return f"; did you mean --{suggestion.removeprefix('--')}?" if suggestion else ""


def _only_option_with(word: str, options: list[str]) -> str | None:
    """The only option whose words hold all of these, `--max-new-tokens` for max-tokens."""
    words = set(re.split("[-_]", word.lower()))
    holding = [option for option in options if words <= set(option.strip("-").split("-"))]
    return holding[0] if len(holding) == 1 else None


def _key_meant(word: str) -> str | None:
    """The config key that an option was meant to set: `train.lr`, `lr`, `learning-rate`."""
    from smtrain.core.config import JobConfig
    from smtrain.core.config.error_messages import every_key, key_meant

    key = word.replace("-", "_")
    return key if key in every_key(JobConfig) else key_meant(JobConfig, key, close=False)


def _subcommand_meant(word: str, commands: list[str], path: str) -> str:
    group = path.partition(" ")[2]
    names = table("word_names")["commands"]
    words_by_command = {name.rpartition(" ")[2]: words for name, words in names.items()}
    suggestion = nearest(word, commands, words_by_command)
    if suggestion:
        return f"; did you mean `{path} {suggestion}`?"
    return f"; known: {', '.join(f'`smtrain {group} {command}`' for command in commands)}"


def _extra_meant(extra: str, context: Any, argv: list[str]) -> str:
    """The likely --set of an extra word: `train.lr=1e-4`, or the value after `--set train.lr`."""
    options = (
        [option for param in context.command.get_params(context) for option in param.opts]
        if context
        else []
    )
    first = extra.split()[0] if extra.split() else ""
    for param in context.command.get_params(context) if context and first else ():
        if first in _choices_of(param) and param.opts[0].startswith("--"):
            return f"; did you mean {param.opts[0]} {first}?"
    if "--set" not in options or not first:
        return ""
    key, equals, _ = first.partition("=")
    if equals and _KEY.fullmatch(key):
        return f"; did you mean --set {first}?"
    at = argv.index(first) if first in argv else 0
    if at >= 2 and argv[at - 2] == "--set" and _KEY.fullmatch(argv[at - 1]):
        return f"; did you mean --set {argv[at - 1]}={first}?"
    return ""


def _choices_of(param: Any) -> list[str]:
    """The values of an option, if its default is an enum or its type lists them."""
    if isinstance(param.default, Enum):
        return [str(choice.value) for choice in type(param.default)]
    return [str(choice) for choice in getattr(getattr(param, "type", None), "choices", None) or ()]


def _typed_value(option: str, argv: list[str]) -> str:
    """The value that was typed for an option; empty if it has no value."""
    for at, word in enumerate(argv):
        if word == option and at + 1 < len(argv):
            return argv[at + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
