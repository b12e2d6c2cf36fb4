"""`smtrain.chat`: a conversation with a model, or with two that answer the same questions."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from smtrain.client.launch.names import require_name
from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.core.extras import pause_collector
from smtrain.core.model.chat_options import checked_options, read_template
from smtrain.core.model.hf_config import positions_named
from smtrain.core.public_api import misuse, public
from smtrain.core.spinner import spinner
from smtrain.core.targets import TargetName
from smtrain.core.text import Say
from smtrain.tools.chat.conversation import Chat, Conversation, EndpointChat, Speaker
from smtrain.tools.chat.resolve_model import FoundModel, find, find_trained
from smtrain.worker.generation.memory_fit import refuse_too_large
from smtrain.worker.generation.sampling import Sampling

Models = tuple[FoundModel, FoundModel | None, FoundModel | None]
"""A model, another one to compare it with, and the adapter on the first."""
# A conversation's own defaults: greedy answers of small models repeat themselves.
CHAT_SAMPLING = Sampling(max_new_tokens=256, temperature=0.7, top_k=50, top_p=0.95)


@public
def chat(
    model: Any = None,
    *,
    compare: Any = None,
    adapter: Any = None,
    system: str | None = None,
    template: str | Path | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    turns: int | None = None,
    sampling: Sampling | None = None,
    endpoint: str | None = None,
    target: TargetName | None = None,
    processes: int | None = None,
    config: Any = None,
    say: Say = lambda _: None,
    **settings: Any,
) -> Chat:
    """A conversation with a model, loaded here. The memory is counted before anything is loaded.

    With `endpoint` the model is that of a SageMaker endpoint, and nothing is loaded.

    Args:
        model: A Hugging Face folder or an adapter as PEFT writes it, a run or job or the name of
            one, an s3:// prefix, or a folder of training checkpoints.
        compare: A second model, which answers the same questions first.
        adapter: An adapter's folder, run or s3:// prefix, put on `model` without merging.
        system: The system prompt.
        template: File of a chat template, in place of the model's own.
        chat_template_kwargs: Options of the chat template, such as {"enable_thinking": False}.
        turns: How many earlier questions, with their answers, go before a new one. Default: as many
            as there is room.
        sampling: How answers are drawn. Default: at temperature 0.7, among the 50 likeliest and
            0.95 of probability; with `temperature=0` the likeliest token each time.
        endpoint: A SageMaker endpoint, such as `smtrain.deploy` makes, in place of `model`.
        target: `local` or `aws`, for a run, job or s3:// prefix. Default: here if it is known here,
            else AWS.
        processes: Divide the model over so many processes, each of which loads only its part.
            Default: one; of a checkpoint on accelerators, as many as hold it.
        config: The model whose config.json and tokenizer belong to a training checkpoint that has
            none.
        say: Called with each line about progress.
        **settings: Fields of `Sampling` in place of single ones: max_new_tokens, temperature,
            top_k, top_p, beams, stop, seed.

    Returns:
        The conversation: `ask`, `stream`, `retry`, `clear`; in a notebook it shows a box to type
        in.

    Raises:
        CheckpointError: There is no model or chat template, the adapter is for another model, or
            the memory of this machine does not hold it.
        ConfigError: A setting has no meaning, or not exactly one of model and endpoint is given.
        JobError: No run or job of that name has a model.

    Examples:
        >>> talk = smtrain.chat("demo://tiny-llama", max_new_tokens=4, temperature=0)
        >>> answer = talk.ask("What is a list?")
        >>> [message["role"] for message in talk.messages]
        ['user', 'assistant']
    """
    # temperature 0 draws nothing, so top_k and top_p must be off
    usual = (
        replace(CHAT_SAMPLING, temperature=0.0, top_k=0, top_p=1.0)
        if settings.get("temperature") == 0
        else CHAT_SAMPLING
    )
    final_sampling = known_settings(sampling or usual, settings)
    options = checked_options("chat_template_kwargs", chat_template_kwargs)
    if turns is not None and turns < 0:
        raise ConfigError(f"turns: got {turns}; at least 0 is needed", code="config.wrong_value")
    if endpoint is not None:
        local_options = {
            "model": model,
            "compare": compare,
            "adapter": adapter,
            "template": template,
        }
        _refuse_with_endpoint(endpoint, {**local_options, "processes": processes, "config": config})
        return EndpointChat(endpoint, final_sampling, system, turns, target, options)
    if model is None:
        raise ConfigError(
            "model: is missing; name a folder, run, job or s3:// prefix, or an endpoint",
            code="config.missing_key",
        )
    models = find_models(model, compare, adapter, target, config)
    file = None if template is None else Path(template)
    if file is not None:
        read_template(file)  # refused before the model is loaded
    base, trained_model = _load_with_template(models, file, options, processes, say)
    speakers = (
        [Speaker("base", base, base is trained_model, Conversation(system, turns))]
        if compare is not None
        else []
    )
    name = "trained" if compare is not None else ""
    return Chat(
        [*speakers, Speaker(name, trained_model, False, Conversation(system, turns))],
        final_sampling,
    )


def _refuse_with_endpoint(endpoint: str, options: dict[str, Any]) -> None:
    """Raise `ConfigError` for an option that the endpoint has fixed, and for an invalid name."""
    if option := next((key for key, value in options.items() if value is not None), None):
        raise ConfigError(
            f"{option}: endpoint {endpoint} serves one model in its own way; leave one of the"
            " two out",
            code="config.combination",
        )
    require_name("endpoint", endpoint)


def known_settings(sampling: Sampling, settings: dict[str, Any]) -> Sampling:
    """`sampling` with some settings replaced. Raises `ConfigError` for an unknown one, and a value
    of another type.
    """
    if unknown_names := sorted(settings.keys() - Sampling.__dataclass_fields__.keys()):
        names = ", ".join(Sampling.__dataclass_fields__)
        raise ConfigError(
            f"{unknown_names[0]}: is not a generation setting; the settings are {names}",
            code="config.unknown_key",
        )
    if isinstance(settings.get("stop"), str):
        settings = {**settings, "stop": (settings["stop"],)}
    if wrong := misuse(Sampling, (), settings):
        raise ConfigError(wrong, code="config.wrong_value")
    return replace(
        sampling,
        **{**settings, **({"stop": tuple(settings["stop"])} if "stop" in settings else {})},
    )


def find_models(
    model: Any, compare: Any, adapter: Any, target: TargetName | None, config: Any = None
) -> Models:
    """The model, the model to compare with if it is another one, and the adapter on the first."""
    source, on_top = (
        find_trained(model, target, config),
        (None if adapter is None else find(adapter, target)),
    )
    comparison_model = None if compare is None else find(compare, target)
    if source.is_adapter:
        if on_top is not None:
            raise CheckpointError(
                f"{source.name} is an adapter itself; name the model that both are for"
            )
        on_top = source
        base = (
            compare if compare is not None else source.model_config.get("base_model_name_or_path")
        )
        if not base or (
            compare is None and not Path(str(base)).is_dir() and "://" not in str(base)
        ):
            raise CheckpointError(
                f"{on_top.name} is an adapter for {base or 'a model it does not name'}, which is"
                " not on this machine; name the model, and the adapter with --adapter (adapter=)"
            )
        source = find(base, target)
    elif on_top is not None and not on_top.is_adapter:
        raise CheckpointError(
            f"{on_top.name} is not an adapter: it has no adapter_config.json; give the export of a"
            " run with train.adapter"
        )
    if source.is_adapter or (comparison_model is not None and comparison_model.is_adapter):
        name = (
            source.name if source.is_adapter else comparison_model.name if comparison_model else ""
        )
        raise CheckpointError(
            f"{name} is an adapter, and a whole model is needed; merge it first with `smtrain"
            " convert`"
        )
    if (
        comparison_model is not None
        and on_top is not None
        and comparison_model.folder.resolve() == source.folder.resolve()
    ):
        comparison_model = None  # the same weights, with the adapter switched off
    return source, comparison_model, on_top


def refuse_unusable(model: FoundModel, template: str | Path | None, sampling: Sampling) -> None:
    """Refuse settings that this model cannot use, before it is loaded.

    Raises `ConfigError` if no prompt leaves room for the text, and `CheckpointError` for a file
    that cannot be read as a chat template.
    """
    if template is not None:
        read_template(Path(template))
    positions = positions_named(model.model_config)
    if positions is not None and sampling.max_new_tokens >= positions:
        raise ConfigError(
            f"max_new_tokens: got {sampling.max_new_tokens:,}, and {model.name} has"
            f" {positions:,} positions for a prompt and its text together; set at most"
            f" {positions - 1}",
            code="config.wrong_value",
        )


def load_models(models: Models, processes: int | None, say: Say) -> tuple[Any, Any]:
    """The model to compare with, which may be the same one, and the model with its adapter.

    The memory is counted before anything is loaded. Raises `CheckpointError` if it is too small,
    and for an adapter on a divided model.
    """
    source, comparison_model, on_top = models
    if processes is not None and processes < 1:
        raise ConfigError(
            f"processes: got {processes}; at least 1 is needed", code="config.wrong_value"
        )
    is_distributed = source.checkpoint or processes is not None
    if on_top is not None and is_distributed:
        description = "a checkpoint" if source.checkpoint else f"a model over {processes} processes"
        raise CheckpointError(
            f"{on_top.name} is an adapter, and {description} takes none; merge it first with"
            " `smtrain convert --merge-adapter`"
        )
    refuse_too_large(
        [model.need for model in (source, on_top, comparison_model) if model is not None],
        processes=processes or 1,
    )
    with spinner("importing torch and transformers"), pause_collector():
        from smtrain.worker.generation.generating import quiet
        from smtrain.worker.generation.load import load

    with spinner(f"loading {source.name}"), quiet():
        base = None if comparison_model is None else load(comparison_model.fetch(say))
        if is_distributed:
            trained_model = _load_distributed(source, processes, say)
        else:
            trained_model = load(
                source.fetch(say), adapter=None if on_top is None else on_top.fetch(say)
            )
    return trained_model if base is None else base, trained_model


def _load_distributed(source: FoundModel, processes: int | None, say: Say) -> Any:
    """The model over processes of this machine."""
    from smtrain.worker.checkpoint.huggingface.damage import refuse_damaged
    from smtrain.worker.generation.ranks import load_divided, usual_processes

    folder = source.fetch(say)
    if not source.checkpoint:
        refuse_damaged(folder)
    count = processes or usual_processes(source.model_config, source.need.total)
    model_folder = source.base.fetch(say) if source.base else folder
    began = time.monotonic()
    model, mesh = load_divided(folder, source.model_config, model_folder, count)
    say(f"{source.name}: {mesh}, loaded in {time.monotonic() - began:.1f} s")
    return model


def _load_with_template(
    models: Models, template: Path | None, options: dict[str, Any], processes: int | None, say: Say
) -> tuple[Any, Any]:
    both_models = load_models(models, processes, say)
    from smtrain.worker.generation.conversation import ignored_in, set_template

    for model in both_models:
        set_template(model, template, options)
        if ignored_notice := ignored_in(model):
            say(ignored_notice)
    return both_models
