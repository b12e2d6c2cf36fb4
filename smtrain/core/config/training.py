"""Sections of a config: the model, its division over processes, and its training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from smtrain.core.config.identity import ADDED_LATER, AddedLater
from smtrain.core.config.section import Secret, Section
from smtrain.core.config.units import Count
from smtrain.core.model.chat_options import reserved_fault
from smtrain.core.model.footprint import Precision
from smtrain.core.model.hf_folder import folder_of
from smtrain.core.model.layout import cuts_of

MOST_STEPS = 10**9
REFERENCES = ("start", "none")
"""Words of train.dpo.reference that are no folder."""


def _drop_default(schema: dict[str, Any]) -> None:
    """Remove the default of a field that loading chooses by the machines."""
    schema.pop("default", None)


def _or_one(schema: dict[str, Any]) -> None:
    """Allow a single name for a list of names."""
    names = {key: schema.pop(key) for key in ("type", "items")}
    schema["anyOf"] = [names, {"type": "string"}]


_SPELLINGS = {"rope_type": "type", "rope_theta": "theta"}
"""transformers' own names of keys of model.rope."""


def _allow_aliases(schema: dict[str, Any]) -> None:
    """Allow transformers' own names too."""
    schema["properties"] |= {
        alias: schema["properties"][canonical_key] for alias, canonical_key in _SPELLINGS.items()
    }


class RopeSection(Section):
    """Other rotary embeddings than config.json has, for longer texts; the export's config.json has
    them (smtrain help data).
    """

    model_config = ConfigDict(json_schema_extra=_allow_aliases)

    type: Literal["default", "linear", "yarn", "llama3"] | None = None
    """Scaling of the positions, by transformers' names (rope_type): `yarn` needs the fewest steps,
    `default` is none; default: the one that the model has.
    """
    factor: float | None = Field(None, ge=1, le=10_000)
    """The new longest sequence divided by the original one."""
    theta: float | None = Field(None, gt=0, le=1e15)
    """Base of the frequencies (rope_theta), with a type or instead of one; default: the model's."""
    original_max_position_embeddings: int | None = Field(None, ge=2, le=10**9)
    """The longest sequence before the scaling; default: the model's max_position_embeddings."""
    beta_fast: float | None = Field(None, gt=0)
    """yarn: from so many turns within the original length, a pair of dimensions stays as it is;
    default: 32.
    """
    beta_slow: float | None = Field(None, gt=0)
    """yarn: up to so many turns, a pair is interpolated fully; default: 1."""
    attention_factor: float | None = Field(None, gt=0)
    """yarn: factor of cosines and sines; default: 0.1 x ln(factor) + 1."""
    truncate: bool | None = None
    """yarn: round the two borders to whole dimensions; default: true."""
    low_freq_factor: float | None = Field(None, gt=0)
    """llama3: pairs with fewer turns within the original length are interpolated fully; default: 1.
    """
    high_freq_factor: float | None = Field(None, gt=0)
    """llama3: pairs with more turns stay as they are; default: 4."""

    @model_validator(mode="before")
    @classmethod
    def _by_our_names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for alias, canonical_key in _SPELLINGS.items():
            if alias in value and value.get(canonical_key, value[alias]) != value[alias]:
                raise ValueError(
                    f"{canonical_key} and {alias} are one key with two values; give one of them"
                )
        return {_SPELLINGS.get(key, key): item for key, item in value.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by transformers' names, without those that were left out."""
        aliases = {canonical_key: name for name, canonical_key in _SPELLINGS.items()}
        return {
            aliases.get(key, key): value
            for key, value in self.model_dump().items()
            if value is not None
        }


class Model(Section):
    """The model that training starts from."""

    path: str
    """A Hugging Face folder (config.json, safetensors, tokenizer): a local path, s3://...,
    hf://organization/model@revision, modelscope://organization/model@revision,
    jumpstart://MODEL_ID@VERSION of SageMaker JumpStart, demo://smollm2, demo://tiny-llama, or
    run://NAME for the model that the run NAME exported.
    """
    weights: Annotated[str | None, ADDED_LATER] = None
    """Path of the weights, if not `path`: a folder or s3:// URI of any kind that `smtrain convert`
    reads, such as Megatron's s3://bucket/run/iter_0001000; config.json and tokenizer come from
    `path`.
    """
    token: Secret | None = None
    """The token that gated or private hf:// models and data, or a modelscope:// model, need."""
    rope: RopeSection | None = None
    """Extend the model to longer texts: {type: yarn, factor: 4}, or {theta: 1000000}; default: as
    in config.json.
    """
    init: Literal["weights", "scratch"] = "weights"
    """`weights` continues from the folder's weights; `scratch` takes only its config and starts at
    random.
    """
    chat_template_kwargs: Annotated[dict[str, Any], ADDED_LATER] = Field(default_factory=dict)
    """Options of the model's chat template for all conversations that are learned, answered or
    evaluated, such as {enable_thinking: false}; those of a record win.
    """

    @field_validator("chat_template_kwargs")
    @classmethod
    def _options(cls, value: dict[str, Any]) -> dict[str, Any]:
        if fault := reserved_fault(value):
            raise ValueError(fault)
        return value

    @field_validator("path", "weights")
    @classmethod
    def _folder(cls, value: str | None) -> str | None:
        return None if value is None else folder_of(value)


class Parallel(Section):
    """Division of the model over processes."""

    tp: int = Field(1, ge=1)
    """Tensor-parallel degree: how many processes share every layer."""
    pp: int = Field(1, ge=1)
    """Pipeline-parallel degree: into how many stages the layers are cut."""
    dp: int | None = Field(None, ge=1)
    """Data-parallel degree: how many copies of the model train, each on different data; default:
    processes / (tp x pp x cp).
    """
    cp: Annotated[int, ADDED_LATER] = Field(1, ge=1)
    """Context-parallel degree: into how many parts every sequence is cut, each on another process,
    which divides the activations of long sequences. Attention stays exact. Engine native only.
    """
    ep: Annotated[int, ADDED_LATER] = Field(1, ge=1)
    """Expert-parallel degree: how many neighbouring data-parallel processes (dp x cp) divide the
    experts of each layer of a mixture of experts. Tokens travel to their experts and back. Engine
    native only.
    """
    expert_capacity: Annotated[float | None, ADDED_LATER] = Field(None, ge=1, le=1024)
    """Most tokens that one process sends to an expert, as a multiple of an even share: tokens
    beyond it pass by the expert. Shapes are then the same in every step, and memory is bounded;
    default: no limit, and nothing is dropped.
    """
    micro_batch_size: int = Field(1, ge=1)
    """Sequences that one copy of the model takes at a time.

    More is faster and needs more memory.
    """
    sequence_parallel: bool = Field(False, json_schema_extra=_drop_default)
    """Also divide the activations between tensor-parallel layers, along the sequence: less memory;
    needs tp > 1. Default: true if engine nxd needs it (bf16).
    """
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """`full` keeps only each layer's input and recomputes the rest in the backward pass;
    `selective` recomputes only attention: engine nxd its softmax, engine native, whose kernels keep
    no scores, the attention module.
    """
    zero1: bool = True
    """Split the optimizer's state over the copies of the model; only engine nxd can train without.
    """
    shard: Annotated[Literal["auto", "optimizer", "full"], AddedLater(same=("optimizer",))] = "auto"
    """Data-parallel processes (dp x cp) divide the state of the `optimizer` (ZeRO-1), or with `full`
    also weights and gradients (torch's FSDP2), which takes less memory and more messages. Engine
    native only. `auto` takes `full` if the plan says that `optimizer` does not
    fit, or is slower because it needs more tp, pp or recomputation.
    """
    layers_per_stage: Annotated[tuple[int, ...], ADDED_LATER] = ()
    """The number of layers of each pipeline stage, such as [7, 8, 8, 7]; default: even stages, the
    remainder last. The last stage also has the output matrix, which can take as long as a few
    layers (smtrain help planner).
    """
    pipeline_cuts: tuple[int, ...] = ()
    """Engine nxd: the same as layers_per_stage in neuronx-distributed's words, the last layer of
    every pipeline stage but the last.
    """
    virtual_stages: int = Field(1, ge=1)
    """Engine nxd: how many stages each pipeline rank holds (interleaved schedule)."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """The last layer of every stage but the last; empty: even stages."""
        return cuts_of(self.layers_per_stage) if self.layers_per_stage else self.pipeline_cuts


class AdapterSection(Section):
    """LoRA: the model's weights stay as they are, and two small matrices next to each linear layer
    are trained.
    """

    type: Literal["lora"] = "lora"
    """The kind of adapter: lora."""
    rank: int = Field(16, ge=1, le=65536)
    """Rank of the two matrices (peft's r): more can learn more, and takes more memory."""
    alpha: float = Field(32.0, gt=0)
    """The adapters' output is multiplied by alpha / rank (peft's lora_alpha)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's input to drop in training (peft's lora_dropout); engine nxd
    takes 0 only.
    """
    targets: tuple[str, ...] = Field(("all-linear",), json_schema_extra=_or_one)
    """Which linear layers, by the last part of their names, such as [q_proj, v_proj]; `all-linear`:
    all in the decoder layers (peft's target_modules), without experts. Experts:
    experts.gate_up_proj and experts.down_proj (peft's target_parameters), or the linears of each by
    name (smtrain help lora).
    """
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, for high ranks (peft's use_rslora)."""
    quantize: Annotated[Literal["nf4"] | None, ADDED_LATER] = None
    """QLoRA: keep the frozen linears in 4 bits (bitsandbytes' NF4 with double quantisation), a
    quarter of their memory in bf16; needs the extra qlora. Embedding, output matrix, norms, routers
    and experts stay as they are.
    """

    @field_validator("targets", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class DpoSection(Section):
    """Preference training (DPO): chosen answers become likelier than rejected ones, measured
    against a reference.
    """

    beta: float = Field(0.1, gt=0)
    """Strength of the tie to the reference: a smaller value lets the model move further away."""
    loss: Literal["sigmoid", "robust", "ipo", "hinge", "sigmoid_norm"] = "sigmoid"
    """The loss of a pair, by TRL's names: `sigmoid` is DPO, `robust` expects wrong preferences
    (label_smoothing), `ipo` and `sigmoid_norm` divide log-probabilities by the answers' lengths,
    `hinge` is SLiC's.
    """
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Loss robust: the share of pairs whose preference is assumed to be wrong."""
    sft_weight: float = Field(0.0, ge=0)
    """Weight of the mean loss of the chosen answers' tokens, which is added (RPO); keeps their
    likelihood from falling.
    """
    reference: str = Field("start", min_length=1)
    """The model whose log-probabilities count as 0 reward: `start` is the model that this run
    starts from, `none` no model, else a Hugging Face folder of the same shape: local, s3:// or
    run://NAME.
    """
    packing: bool = True
    """Put several pairs into a row of seq_len tokens; `false`: one pair a row, so that
    global_batch_size counts pairs.
    """

    @field_validator("reference")
    @classmethod
    def _folder(cls, value: str) -> str:
        return value if value in REFERENCES else folder_of(value)

    @property
    def folder(self) -> str | None:
        """The reference's folder or URI; None if `reference` is a word."""
        return None if self.reference in REFERENCES else self.reference


class Validation(Section):
    """Validation on text that the training never sees."""

    interval: int = Field(100, ge=1)
    """Steps between validations; there is also one before the first step and one after the last."""
    batches: int | None = Field(None, ge=1)
    """Number of global batches of the held-out text in each validation, always the same ones;
    default: all.
    """
    fraction: float | None = Field(None, gt=0, lt=1)
    """Share of the documents (sft: conversations, dpo: pairs) to hold out, chosen by a hash of
    their text.
    """
    path: str | None = None
    """Instead of `fraction`: other text to validate on, in every form that data.path takes but
    hf://.
    """
    split: str | None = None
    """Instead of `fraction`, for data.format megatron: parts for training, validation and test, as
    Megatron's `--split 980,10,10`, in the order of the documents.
    """
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss, whatever its age."""
    samples: int = Field(0, ge=0, le=64)
    """sft: number of held-out questions that the model answers into the log at every validation."""
    sample_tokens: int = Field(64, ge=1, le=4096)
    """sft: longest of these answers, in tokens."""

    @field_validator("split")
    @classmethod
    def _three_parts(cls, value: str | None) -> str | None:
        if value is not None:
            parts(value)
        return value

    @property
    def selection(self) -> dict[str, float | str]:
        """The settings that decide which text is held out."""
        choices = {"fraction": self.fraction, "path": self.path, "split": self.split}
        return {key: value for key, value in choices.items() if value is not None}


def parts(split: str) -> tuple[float, float, float]:
    """The shares of training, validation and test, which add up to 1.

    Raises ValueError if these are no such numbers, or training or validation has none.
    """
    try:
        numbers = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        raise ValueError(
            "it is two or three numbers with commas between, such as 980,10,10"
        ) from None
    numbers += [0.0] * (3 - len(numbers))
    if len(numbers) != 3 or not all(0 <= n < 1e15 for n in numbers):
        raise ValueError("it is two or three numbers with commas between, such as 980,10,10")
    if not numbers[0] or not numbers[1]:
        raise ValueError(
            "it leaves nothing for training or validation; give both a part, such as 980,10,10"
        )
    total = sum(numbers)
    return numbers[0] / total, numbers[1] / total, numbers[2] / total


class Profile(Section):
    """A trace of a few steps, and which part of a step takes how long, early in a job."""

    steps: int = Field(3, ge=1, le=100)
    """Number of steps to trace for a viewer; as many more are timed by their parts."""
    skip: int = Field(2, ge=0, le=10**6)
    """Steps of the job before those: the first ones compile, allocate and fill caches."""


class BatchRamp(Section):
    """A global batch that grows with the samples seen, as Megatron's --rampup-batch-size."""

    start: int = Field(ge=1, le=10**7)
    """Sequences of the first step, a multiple of dp x parallel.micro_batch_size."""
    increment: int = Field(ge=1, le=10**7)
    """Sequences that are added each time, until the batch is train.global_batch_size."""
    samples: int = Field(ge=1, le=10**15)
    """Sequences over which the batch grows, in equal parts."""


class Train(Section):
    """The training run itself."""

    engine: Literal["native", "nxd"] = Field("native", json_schema_extra=_drop_default)
    """Library for parallelism: torch only, or neuronx-distributed (smtrain help nxd); default: the one
    for the machines, nxd on ml.trn1 and native on ml.trn2, on GPUs, on CPUs and on this machine.
    """
    objective: Literal["pretrain", "sft", "dpo"] = "pretrain"
    """`pretrain` learns every token of the text; `sft` learns the assistant's answers in
    instruction data; `dpo` learns from pairs of a chosen and a rejected answer (smtrain help dpo).
    """
    dpo: Annotated[DpoSection | None, ADDED_LATER] = None
    """Options of objective dpo; default: those of TRL."""
    adapter: Annotated[AdapterSection | None, ADDED_LATER] = None
    """Train a LoRA adapter, in a fraction of the memory (smtrain help lora); default: all weights are
    trained.
    """
    steps: int = Field(1000, ge=0, le=MOST_STEPS)
    """Optimizer steps of the whole run; one that resumes continues up to this number."""
    tokens: Count | None = Field(None, ge=1, le=10**17)
    """Train on at least so many tokens (300000000, 2e9, `2B`), instead of steps: as many steps as
    they take.
    """
    global_batch_size: int = Field(8, ge=1, le=10**7, json_schema_extra=_drop_default)
    """Sequences per optimizer step over all machines, a multiple of dp x parallel.micro_batch_size;
    default: the least from 8 on, or, on AWS if `parallel` is also left out, the least that keeps
    the machines busy.
    """
    batch_ramp: Annotated[BatchRamp | None, ADDED_LATER] = None
    """Begin with smaller batches (engine native); schedules count steps, of which the first are
    smaller then. Default: train.global_batch_size from the first step on.
    """
    max_global_batch_size: int | None = Field(None, ge=1, le=10**7)
    """Choose the global batch up to this one at which the machines train most tokens a second,
    instead of global_batch_size; with a given mesh, the largest multiple that it takes.
    """
    seq_len: int = Field(4096, ge=2, le=10**8, json_schema_extra=_drop_default)
    """Tokens per sequence, at most what the model has positions for (dpo: of a row, which holds
    both answers of a pair, each with its prompt, so that one takes at most half); default: 4096, or
    as many as a model in a local folder has.
    """
    lr: float = Field(1.5e-4, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate that a cosine or linear schedule falls to, reached after the last step."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Decay of the learning rate after warm-up: none, along a cosine, or linear."""
    warmup_steps: int | float = Field(0, ge=0, le=10**9)
    """Steps of linear warm-up from 0 to `lr`; below 1 the share of train.steps, such as 0.1."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.1, ge=0, json_schema_extra=_drop_default)
    """Decoupled weight decay; norms and biases are exempt.

    Default: 0.1, or 0 with train.adapter.
    """
    grad_clip: float = Field(1.0, gt=0)
    """Gradients with a larger norm, taken over the whole model, are scaled down to this one."""
    aux_loss: Annotated[float | None, ADDED_LATER] = Field(None, ge=0)
    """Factor of the auxiliary loss that evens out the loads of experts; default:
    router_aux_loss_coef of config.json, and 0 with adapters that leave experts out. It is the mean
    over micro-batches, so it depends on parallel.micro_batch_size and dp a little.
    """
    aux_by_layer: Annotated[bool, ADDED_LATER] = False
    """One auxiliary loss for each layer, added up, as in Megatron-core; default: one over all
    layers, as in transformers.
    """
    router_bias_update_rate: Annotated[float, ADDED_LATER] = Field(0.0, ge=0, le=1)
    """Step by which each optimizer step moves the biases of experts that balance their loads
    without a loss: up for experts below the mean load, down for those above it. Routers of
    DeepSeek-V3's kind only (its own training took 0.001). Default: 0, the biases stay.
    """
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the data order and of a start from scratch."""
    precision: Precision = "bf16"
    """Number format of weights and activations; optimizer state and master weights are always fp32.
    `fp16`, for GPUs without bf16 and engine native, scales the loss and skips steps whose gradients
    overflow (smtrain help gpus).
    """
    stochastic_rounding: bool = False
    """Engine nxd, bf16: the Neuron cores round at random instead of to the nearest."""
    compile: Annotated[bool | None, AddedLater((False,))] = None
    """Engine native: compile the layers and the loss (torch.compile). The first step takes some 10
    seconds longer on a GPU, later steps less; numbers differ in the last digits. Default: on GPUs
    if the run is long enough, else no.
    """
    deterministic: Annotated[bool | None, AddedLater((True,))] = None
    """Engine native: only kernels that give the same bits each time, so that a resumed run has the
    losses of an unbroken one to the last digit. Slower on GPUs. Default: no on GPUs; yes on other
    machines, as it is free there.
    """
    stall_minutes: float = Field(30, ge=0, le=100_000)
    """Minutes without a finished step after which the job ends, with the position of each rank in
    the log; 0: never.
    """
    log_interval: int = Field(1, ge=1)
    """Steps between log lines."""
    param_norm: Annotated[Literal["none", "all", "layers"], ADDED_LATER] = "none"
    """Log the norm of the trained parameters after each step (engine native), each number once over
    all processes: of `all` together, or also by `layers` in TensorBoard.
    """
    save_interval: int = Field(100, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    profile: Profile | None = None
    """Trace some steps and time their parts (engine native); default: no."""
    validation: Annotated[Validation | None, ADDED_LATER] = None
    """Hold out part of the text and log the loss on it; default: none."""

    @field_validator("warmup_steps")
    @classmethod
    def _steps_or_a_share(cls, value: float) -> int | float:
        if value >= 1 and value != int(value):
            raise ValueError("whole steps, or below 1 the share of train.steps, are needed")
        return value if 0 < value < 1 else int(value)

    @property
    def preference(self) -> DpoSection | None:
        """The options of objective dpo; None for other objectives."""
        return (self.dpo or DpoSection()) if self.objective == "dpo" else None

    @property
    def quantizes(self) -> bool:
        """Whether the frozen linears of an adapter's base are kept in 4 bits (QLoRA)."""
        return self.adapter is not None and self.adapter.quantize is not None

    def batch_at(self, samples: int) -> int:
        """The global batch that follows a number of consumed samples."""
        ramp, full_batch = self.batch_ramp, self.global_batch_size
        if ramp is None or samples >= ramp.samples:
            return full_batch
        increments = (full_batch - ramp.start) // ramp.increment
        return ramp.start + samples * increments // ramp.samples * ramp.increment

    def batches(self, steps: int | None = None, samples: int = 0) -> list[tuple[int, int]]:
        """(steps, samples of each) of the run's first `steps` after `samples`, for every stretch
        with one batch.
        """
        remaining_steps, out = self.steps if steps is None else steps, []
        while remaining_steps > 0:
            size, ramp = self.batch_at(samples), self.batch_ramp
            count = remaining_steps
            if ramp is not None and samples < ramp.samples:
                increments = (self.global_batch_size - ramp.start) // ramp.increment
                completed_increments = (size - ramp.start) // ramp.increment
                next_increment_at = -(
                    -(completed_increments + 1) * ramp.samples // max(1, increments)
                )  # the first sample of the next size
                count = min(
                    remaining_steps,
                    max(1, -(-(min(next_increment_at, ramp.samples) - samples) // size)),
                )
            out.append((count, size))
            remaining_steps, samples = remaining_steps - count, samples + count * size
        return out

    @property
    def samples(self) -> int:
        """Sequences of the whole run."""
        return sum(count * size for count, size in self.batches())

    def steps_for(self, samples: int) -> int:
        """The fewest steps that read so many sequences."""
        steps = sample_count = 0
        for count, size in self.batches(samples):
            if (needed_steps := -(-(samples - sample_count) // size)) <= count:
                return steps + max(0, needed_steps)
            steps, sample_count = steps + count, sample_count + count * size
        return steps

    @property
    def warmup(self) -> int:
        """Steps of the warm-up, also if given as a share of `steps`."""
        return (
            int(self.warmup_steps)
            if self.warmup_steps >= 1
            else round(self.warmup_steps * self.steps)
        )
