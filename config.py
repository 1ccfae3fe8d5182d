"""Every setting of Paddock: its name, type, default and meaning, and what must hold between them.

One setting has one name: `MAX_STEPS` in `.env` and in the environment, `--max-steps` as a flag, `max_steps` in JSON and as an
attribute. Where they are read from is the business of settings.py.
"""

import os
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, Optional, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from common.text import is_url, without_passwords

SAMPLE = "data/sample"  # as presets/sample*.env name it; scripts/make_sample.py makes it
LONGEST_NAME = 200  # bytes, of the 255 that file systems allow
LARGEST = 2**53  # a number above it is a slip, and would not survive JSON


def setting(on_resume: str, default, meaning: str, **limits):
    """A field with its one line of meaning, and what a resumed run may do with it. Every number has an upper limit."""
    if limits and not {"lt", "le"} & set(limits):
        limits["le"] = LARGEST
    return Field(default, description=meaning, json_schema_extra={"on_resume": on_resume}, **limits)


# Between a checkpoint and the run that goes on from it, a setting can change freely; changes the curve from there on, which
# is told; or makes it another run, which is refused unless ALLOW_RESUME_MISMATCH names it.
safe, curve, fixed = (partial(setting, on_resume) for on_resume in ("safe", "curve", "fixed"))


class Section(BaseModel):
    """A group of settings; frozen, so that what a run logs is what it does."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False,
                              hide_input_in_errors=True)


class RunConfig(Section):
    """What kind of run it is, where it lives, what it starts from, and the machine's part."""

    preset: str = safe("", "named settings from presets/, above .env unless that names it; several with commas, the last wins")
    training_stage: Literal["pretrain", "sft", "dpo"] = fixed("pretrain", "what the model learns from")
    output_dir: str = safe("runs", "folder of all runs")
    run_name: Optional[str] = safe(None, "folder of this run in OUTPUT_DIR; none = <stage>-<date-time>")
    resume: str = safe("auto", "auto = go on from the newest verified checkpoint of RUN_NAME, never, or a checkpoint's path")
    pretrain_checkpoint: Optional[str] = safe(None, "start from this pretraining checkpoint (step name or path)")
    instruct_checkpoint: Optional[str] = safe(None, "start from this SFT checkpoint (step name or path)")
    dpo_checkpoint: Optional[str] = safe(None, "start from this DPO checkpoint (step name or path)")
    random_init: bool = safe(False, "sft without a checkpoint to start from trains random weights; refused unless this is true")
    reset_optimizer: bool = safe(False, "take only the weights of the checkpoint; optimizer and step begin anew")
    start_step: Optional[int] = safe(None, "count steps from here, whatever the checkpoint says", ge=0)
    allow_resume_mismatch: str = safe("", "settings that may differ from the checkpoint's, with commas")
    seed: int = fixed(1337, "of initialisation, row order, dropout and samples", ge=0, lt=2**32)
    device: Literal["auto", "cpu", "cuda"] = safe("auto", "auto = cuda where there is one")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = curve(
        "auto", "of matmuls, over fp32 master weights; auto = bf16 where the hardware is fast at it, else fp32")
    tf32: bool = curve(True, "let fp32 matmuls on CUDA use TensorFloat-32")
    deterministic: bool = safe(
        False, "kernels on CUDA that give the same bits each time, so that resuming is exact there; slower")
    compile: bool = safe(True, "torch.compile; without a compiler the run goes on eagerly with a warning")
    debug: bool = safe(False, "detailed checks: names the first module whose output is not finite (slow)")
    distributed_timeout: float = safe(600, "seconds without a move after which the job is taken to hang, and ends", gt=0)
    drift_check_every: int = safe(500, "steps between comparisons of the ranks' weights and optimizer states; 0 = never", ge=0)
    world_size: int = safe(1, "number of processes, set by torchrun; with --check, the number to plan for", ge=1)


class DataConfig(Section):
    """What is read, and how it becomes rows."""

    pretrain_data_path: Optional[str] = safe(None, "prepared token shards: a folder, a file or a glob")
    sft_data_path: Optional[str] = safe(None, "prepared chats")
    dpo_data_path: Optional[str] = safe(None, "prepared preference pairs")
    cache_dir: Optional[str] = safe(
        None, "folder of what is computed of the data once; none = beside it, or under OUTPUT_DIR where that cannot be written")
    hellaswag_path: Optional[str] = safe(None, "HellaSwag items, jsonl or jsonl.gz")
    tokenizer_path: Optional[str] = safe(None, "a BPE file in tiktoken's format, a tokenizer.json, or a hub name")
    tokenizer_backend: Literal["auto", "tiktoken", "huggingface"] = safe("auto", "auto = by the look of TOKENIZER_PATH")
    verify_data: Literal["auto", "always"] = safe("auto", "auto = hash a shard again only when its size or time changed")
    document_mask: bool = fixed(True, "documents in one row do not attend to each other and positions restart")
    prefetch_steps: int = safe(2, "steps of rows that the loader keeps ready", ge=1)


class PreparationConfig(Section):
    """How text becomes token shards."""

    shard_tokens: int = safe(100_000_000, "tokens in one prepared shard", ge=1)
    validation_fraction: float = safe(0.005, "share of documents held out, chosen by their hash", ge=0, lt=1)
    system_prompt: str = safe("", "put before chats that have no system message")
    preparation_workers: int = safe(0, "processes that tokenise; 0 = one per core", ge=0)


class ModelConfig(Section):
    """The shape of the model, and the kernels that compute it."""

    dim: int = fixed(768, "width of the residual stream", ge=1, le=1 << 20)
    n_layers: int = fixed(12, "transformer blocks", ge=1, le=65_536)
    n_heads: int = fixed(12, "query heads", ge=1, le=65_536)
    n_kv_heads: int = fixed(4, "key/value heads (grouped-query attention)", ge=1)
    ffn_dim: Optional[int] = safe(None, "width of the feed-forward; none = from the next two, as Meta does", ge=1)
    multiple_of: int = safe(256, "the feed-forward's width is rounded up to a multiple of this", ge=1)
    ffn_dim_multiplier: Optional[float] = safe(None, "factor on the feed-forward's width of 8/3 DIM", gt=0)
    norm_eps: float = fixed(1e-5, "epsilon of RMSNorm", gt=0)
    rope_theta: float = fixed(500_000.0, "base of the rotary embedding", gt=0)
    rope_scaling_factor: Optional[float] = fixed(None, "Llama 3.1's stretching of long wavelengths; none = off", ge=1)
    rope_low_freq_factor: float = fixed(1.0, "of Llama 3.1's scaling", gt=0)
    rope_high_freq_factor: float = fixed(4.0, "of Llama 3.1's scaling", gt=0)
    rope_original_max_len: int = fixed(8192, "context length before Llama 3.1's scaling", ge=1)
    tie_embeddings: bool = fixed(True, "one matrix for embedding and head")
    init_std: float = safe(0.02, "standard deviation of initial weights; residual projections get / sqrt(2 N_LAYERS)", gt=0)
    attention_backend: Literal["auto", "flash", "cudnn", "sdpa", "math"] = safe(
        "auto", "kernel of attention; a named one that is missing is an error, auto takes the fastest")
    activation_checkpointing: Literal["none", "selective", "block"] = safe(
        "none", "what the backward computes again: each block, or what ACTIVATION_MEMORY_BUDGET says")
    activation_memory_budget: float = safe(
        0.9, "selective: share of the activations that may be kept; what is cheapest to recompute goes first", ge=0, le=1)
    head_chunk_tokens: int = safe(0, "tokens whose logits exist at a time; 0 = by the vocabulary", ge=0)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward. Source: Llama 3's reference model."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        width = int(2 * 4 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return max(1, -(-width // self.multiple_of)) * self.multiple_of


class OptimConfig(Section):
    """The batch, the length of the run, and how weights are updated."""

    total_batch_size: int = fixed(524_288, "tokens in one step, over all ranks; accumulation follows from it", ge=1)
    micro_batch_size: int = safe(8, "rows in one forward of one rank; 0 = all of its rows of a step", ge=0)
    max_seq_len: int = fixed(1024, "tokens in a row", ge=1)
    max_steps: int = curve(1000, "optimizer steps of the whole run", ge=0)
    optimizer: Literal["adamw", "muon"] = fixed("adamw", "muon = Muon for the blocks' matrices, AdamW for the rest")
    learning_rate: float = curve(6e-4, "peak learning rate", gt=0)
    min_learning_rate: Optional[float] = curve(None, "where the schedule ends; none = a tenth of LEARNING_RATE", ge=0)
    warmup_steps: int = curve(100, "steps of linear warm-up", ge=0)
    lr_schedule: Literal["cosine", "wsd", "constant"] = curve("cosine", "wsd = warm-up, stable, linear decay")
    decay_fraction: float = curve(0.2, "share of MAX_STEPS in which wsd decays", gt=0, le=1)
    weight_decay: float = curve(0.1, "AdamW's, on matrices only", ge=0)
    adam_beta1: float = curve(0.9, "decay of AdamW's first moment", ge=0, lt=1)
    adam_beta2: float = curve(0.95, "decay of AdamW's second moment", ge=0, lt=1)
    adam_eps: float = curve(1e-8, "AdamW's epsilon", gt=0)
    max_grad_norm: float = curve(1.0, "gradients are clipped to this norm; 0 = only measured", ge=0)
    gradient_dtype: Literal["fp32", "bf16"] = curve("fp32", "in which ranks exchange gradients; bf16 = half the bytes, rounded")
    loss_spike_policy: Literal["warn", "skip", "stop"] = curve(
        "warn", "what a loss far above the recent ones leads to; skip = without its update, stop = end before it")
    loss_spike_threshold: float = curve(8.0, "how far that is, in robust standard deviations above the median", gt=0)
    loss_spike_window: int = curve(128, "recent losses that a step's is held against", ge=16, le=10_000)

    @property
    def final_learning_rate(self) -> float:
        """Where the schedule ends."""
        return self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate

    @property
    def rows_per_step(self) -> int:
        """Rows in one step, over all ranks."""
        return self.total_batch_size // self.max_seq_len


class EvaluationConfig(Section):
    """What is measured while the model learns."""

    validate_every: int = safe(250, "steps between validations; 0 = never", ge=0)
    validation_rows: int = curve(256, "rows of the held-out split, always the same", ge=1)
    hellaswag_every: int = safe(500, "steps between HellaSwag evaluations; 0 = never", ge=0)
    hellaswag_examples: int = curve(0, "the first so many items; 0 = all", ge=0)
    hellaswag_name: str = safe("HellaSwag", "what the items of HELLASWAG_PATH are called in the output")
    hellaswag_batch_tokens: int = safe(16_384, "tokens in one forward of HellaSwag", ge=64)
    sample_every: int = safe(500, "steps between written samples; 0 = never", ge=0)
    sample_prompts: str = safe("", "beginnings to continue (a user's words in the stages sft and dpo), with | between")
    sample_tokens: int = safe(96, "tokens of a sample at most", ge=1)
    sample_temperature: float = safe(0.8, "0 = the likeliest token always", ge=0)
    sample_top_p: float = safe(0.95, "nucleus of the distribution that is sampled from", gt=0, le=1)
    early_stopping_patience: int = curve(0, "validations without a new best before the run stops; 0 = never", ge=0)
    early_stopping_skip_steps: int = curve(0, "steps before early stopping begins to count", ge=0)


class CheckpointConfig(Section):
    """When checkpoints are written, and which are kept."""

    save_every: int = safe(500, "steps between checkpoints (the last step is always saved); 0 = only the last", ge=0)
    keep_last: int = safe(3, "newest checkpoints kept; 0 = all", ge=0)
    keep_best: int = safe(1, "checkpoints of lowest validation loss kept besides", ge=0)


class LogConfig(Section):
    """What a run tells, and whom."""

    log_every: int = safe(10, "steps between lines on the console and in metrics.jsonl; 0 = never", ge=0)
    log_all_ranks: bool = safe(False, "every rank on the console, not only rank 0")
    peak_tflops: Optional[float] = safe(None, "the device's dense bf16 TFLOP/s, for MFU; none = known GPUs", gt=0)
    wandb_enabled: bool = safe(False, "log to Weights & Biases too; offline unless WANDB_API_KEY is set")
    wandb_project: str = safe("paddock", "project at Weights & Biases")
    tensorboard_enabled: bool = safe(False, "write TensorBoard files too")
    wandb_api_key: Optional[SecretStr] = safe(None, "secret; never as a flag")
    hf_token: Optional[SecretStr] = safe(None, "secret, for gated repositories; never as a flag")


class LoraConfig(Section):
    """Low-rank adapters."""

    lora_enabled: bool = fixed(False, "train low-rank adapters only; the base is the checkpoint that the run starts from")
    lora_rank: int = fixed(16, "rank of the adapters", ge=1)
    lora_alpha: float = fixed(32.0, "scale of the adapters is alpha / rank", gt=0)
    lora_rslora: bool = fixed(False, "scale by alpha / sqrt(rank) instead")
    lora_dropout: float = fixed(0.0, "dropout on the adapters' input", ge=0, lt=1)
    lora_target_modules: str = fixed("wq,wk,wv,wo,w1,w2,w3", "linear layers that get adapters, with commas")
    lora_train_head: bool = fixed(False, "train the head as a whole besides")
    lora_train_embeddings: bool = fixed(False, "train the embeddings as a whole besides")
    lora_train_tokens: str = fixed(
        "auto", "tokens whose rows learn too: auto = the data's that the base never met, none, or control tokens with commas")
    lora_base_quantization: Literal["none", "int8", "nf4"] = fixed("none", "the frozen base in fewer bits, with bitsandbytes")


class PreferenceConfig(Section):
    """Learning from preferred answers."""

    preference_objective: Literal["dpo", "orpo", "simpo"] = fixed("dpo", "orpo and simpo need no reference model")
    dpo_loss: Literal["sigmoid", "ipo", "hinge"] = fixed("sigmoid", "how the margin becomes a loss")
    dpo_beta: float = fixed(0.1, "strength of the pull towards the reference model", gt=0)
    dpo_label_smoothing: float = fixed(0.0, "share of pairs taken to be the wrong way round (sigmoid only)", ge=0, lt=0.5)
    dpo_length_normalised: bool = fixed(False, "log-probabilities by the token instead of by the answer")
    dpo_sft_weight: float = fixed(0.0, "weight of the chosen answer's cross-entropy besides", ge=0)
    dpo_reference: Literal["auto", "stored", "live"] = safe(
        "auto", "stored = asked once, beside the data; live = a frozen model, or adapters off; auto = stored, with LoRA live")
    orpo_lambda: float = fixed(0.1, "weight of ORPO's odds-ratio term", gt=0)
    simpo_beta: float = fixed(2.0, "scale of SimPO's rewards, which are log-probabilities per token", gt=0)
    simpo_gamma: float = fixed(1.0, "margin between SimPO's rewards to reach; half of SIMPO_BETA is common", ge=0)


class DistillationConfig(Section):
    """Learning from a teacher."""

    distillation_enabled: bool = fixed(False, "learn from a teacher's distribution as well (pretrain and sft)")
    teacher_model: Optional[str] = safe(None, "a Hugging Face causal LM (name or folder) or a Paddock checkpoint")
    teacher_precision: Literal["auto", "bf16", "fp32"] = fixed("auto", "of the teacher's weights; auto = as its files have it")
    distillation_loss: Literal["forward_kl", "reverse_kl", "jsd"] = fixed("forward_kl", "divergence from the teacher")
    distillation_jsd_beta: float = fixed(0.5, "share of the teacher in the mixture of jsd", gt=0, lt=1)
    distillation_weight: float = fixed(0.5, "share of the divergence in the loss; cross-entropy has the rest", ge=0, le=1)
    distillation_temperature: float = fixed(2.0, "softens both distributions", gt=0)
    distillation_top_k: int = curve(0, "0 = the teacher runs along; else its top k are stored beside the data and reused", ge=0)


START_FROM = ("pretrain_checkpoint", "instruct_checkpoint", "dpo_checkpoint")
LOCAL_PATHS = ("output_dir", "cache_dir", "resume", *START_FROM, "pretrain_data_path", "sft_data_path", "dpo_data_path",
               "hellaswag_path")
NAMES_OR_PATHS = ("tokenizer_path", "teacher_model")
PREPARED_BY = {"pretrain": "pretrain", "sft": "instruct", "dpo": "dpo"}  # scripts/load_*_dataset.py


class Config(RunConfig, DataConfig, PreparationConfig, ModelConfig, OptimConfig, EvaluationConfig, CheckpointConfig, LogConfig,
             LoraConfig, PreferenceConfig, DistillationConfig):
    """All sections, flat: a function takes just the section that it needs, and a Config is each of them."""

    @field_validator(*LOCAL_PATHS, *NAMES_OR_PATHS)
    @classmethod
    def at_home(cls, path: Optional[str]) -> Optional[str]:
        """With the user's own folder in place of a ~, which no shell expands in a file, or behind `--output-dir=`."""
        return path and os.path.expanduser(path)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of one rank in one step."""
        return self.rows_per_step // (self.micro_batch_size * self.world_size)

    def public(self) -> dict[str, Any]:
        """Every setting by its name, without secrets and passwords in URLs, as JSON-like values."""
        return {name.upper(): without_passwords(value) if isinstance(value, str) else value
                for name, value in self.model_dump(exclude=set(SECRETS)).items()}


SECTIONS = Config.__bases__
SECRETS = tuple(name for name, field in Config.model_fields.items() if field.annotation == Optional[SecretStr])


class Problem(NamedTuple):
    """What does not go together, and the settings that it is about."""

    settings: tuple[str, ...]
    message: str


def rules(config: Config) -> Iterator[Problem]:
    """What must hold between settings, whatever the files say."""
    c = config
    micro = c.micro_batch_size * c.max_seq_len
    need = micro * c.world_size
    if c.total_batch_size % need:
        below, above = c.total_batch_size // need * need, -(-c.total_batch_size // need) * need
        fits = not c.total_batch_size % (c.max_seq_len * c.world_size)
        smaller = ", or MICRO_BATCH_SIZE=0, which takes as many rows as there are" if fits else ""
        yield Problem(("total_batch_size", "micro_batch_size", "max_seq_len", "world_size"),
                      f"TOTAL_BATCH_SIZE={c.total_batch_size} must be a multiple of MICRO_BATCH_SIZE * MAX_SEQ_LEN * world size "
                      f"= {c.micro_batch_size} * {c.max_seq_len} * {c.world_size} = {need}; try "
                      f"{' or '.join(str(size) for size in (below, above) if size)}{smaller}")
    if c.dim % c.n_heads or c.head_dim % 2:
        yield Problem(("dim", "n_heads"), f"DIM={c.dim} must be an even multiple of N_HEADS={c.n_heads}; "
                                          f"try DIM={max(1, round(c.dim / c.n_heads / 2)) * 2 * c.n_heads}")
    if c.n_heads % c.n_kv_heads:
        divisors = [n for n in range(1, c.n_heads + 1) if c.n_heads % n == 0]
        yield Problem(("n_heads", "n_kv_heads"), f"N_KV_HEADS={c.n_kv_heads} must divide N_HEADS={c.n_heads}; "
                                                 f"try one of {', '.join(map(str, divisors))}")
    if c.rope_high_freq_factor <= c.rope_low_freq_factor:
        yield Problem(("rope_high_freq_factor", "rope_low_freq_factor"),
                      f"ROPE_HIGH_FREQ_FACTOR={c.rope_high_freq_factor} must exceed "
                      f"ROPE_LOW_FREQ_FACTOR={c.rope_low_freq_factor}")
    if c.final_learning_rate > c.learning_rate:
        yield Problem(("min_learning_rate", "learning_rate"),
                      f"MIN_LEARNING_RATE={c.min_learning_rate} exceeds LEARNING_RATE={c.learning_rate}")
    if c.precision == "fp16" and c.device == "cpu":
        yield Problem(("precision", "device"), "PRECISION=fp16 has no fast kernels on a CPU; use fp32, or bf16")
    if c.activation_checkpointing == "selective" and (c.debug or not c.compile):
        off = "DEBUG=true" if c.debug else "COMPILE=false"
        yield Problem(("activation_checkpointing", "debug" if c.debug else "compile"),
                      f"ACTIVATION_CHECKPOINTING=selective is done by the compiler, which {off} turns off; use block, or none")
    if c.early_stopping_patience and not c.validate_every:
        yield Problem(("early_stopping_patience", "validate_every"),
                      "EARLY_STOPPING_PATIENCE needs validations; set VALIDATE_EVERY above 0")
    for name in (*LOCAL_PATHS, *NAMES_OR_PATHS):
        if (value := getattr(c, name)) and is_url(value):
            hub = " or a hub name" if name in NAMES_OR_PATHS else ""
            yield Problem((name,), f"{name.upper()}={value} is a URL, and it must be a path on this machine{hub}; mount what is "
                                   "there, or copy it")
        elif value and re.search(r"\$[\w({]|`", value):
            yield Problem((name,), f"{name.upper()}={value} has a variable or a command in it that nothing expands here; write "
                                   "what it stands for (.env knows ${NAME})")
    path = f"{c.training_stage}_data_path"
    if getattr(c, path) is None:
        script = f"scripts/load_{PREPARED_BY[c.training_stage]}_dataset.py"
        sample = ", or try the embedded sample: bash scripts/run.sh --preset sample" if c.training_stage == "pretrain" else ""
        yield Problem((path,), f"{path.upper()} is not set; prepare data with {script}{sample}")
    if c.tokenizer_path is None:
        yield Problem(("tokenizer_path",), "TOKENIZER_PATH is not set; point it at Llama 3's tokenizer.model, a tokenizer.json, "
                                           "or train one with scripts/train_tokenizer.py")
    if not c.output_dir:
        yield Problem(("output_dir",), "OUTPUT_DIR is empty; set it to a folder, or leave it out (runs)")
    if c.run_name is not None and not is_plain_name(c.run_name):
        yield Problem(("run_name",), f"RUN_NAME={c.run_name!r} must be a plain folder name: letters, digits, '.', '_', '-'")
    elif c.run_name is not None and (size := len(c.run_name.encode())) > LONGEST_NAME:
        yield Problem(("run_name",), f"RUN_NAME={c.run_name[:40]}... takes {size} bytes, and must take {LONGEST_NAME} at most: "
                                     "a letter may take up to four")
    checkpoints = [name for name in START_FROM if getattr(c, name)]
    if len(checkpoints) > 1:
        yield Problem(tuple(checkpoints), f"{' and '.join(n.upper() for n in checkpoints)} are both set; "
                                          "start from one checkpoint")
    if c.random_init and checkpoints:
        yield Problem(("random_init", *checkpoints), f"RANDOM_INIT=true begins with random weights, and {checkpoints[0].upper()} "
                                                     "with trained ones; leave one of them away")
    layers = {name.strip() for name in c.lora_target_modules.split(",")}
    if c.lora_enabled and not layers <= (known := set(LoraConfig().lora_target_modules.split(","))):
        yield Problem(("lora_target_modules",), f"LORA_TARGET_MODULES={c.lora_target_modules} must be some of "
                                                f"{', '.join(sorted(known))}, with commas")
    if c.lora_enabled and not checkpoints and c.resume in ("auto", "never"):
        yield Problem(("lora_enabled",), "LORA_ENABLED=true needs a base to adapt; set PRETRAIN_CHECKPOINT, "
                                         "INSTRUCT_CHECKPOINT or DPO_CHECKPOINT")
    if c.training_stage == "dpo":
        if not checkpoints and c.resume in ("auto", "never"):
            yield Problem(("training_stage",), "TRAINING_STAGE=dpo needs a model that answers already; set INSTRUCT_CHECKPOINT")
        if c.distillation_enabled:
            yield Problem(("distillation_enabled",), "DISTILLATION_ENABLED goes with the stages pretrain and sft, not with dpo")
        if c.dpo_loss != "sigmoid" and c.dpo_label_smoothing:
            yield Problem(("dpo_label_smoothing", "dpo_loss"),
                          f"DPO_LABEL_SMOOTHING goes with DPO_LOSS=sigmoid, not with {c.dpo_loss}")
    if c.distillation_enabled and c.teacher_model is None:
        yield Problem(("teacher_model",), "DISTILLATION_ENABLED=true needs TEACHER_MODEL: a checkpoint, a model folder or a hub "
                                          "name")


def is_plain_name(name: str) -> bool:
    """Whether this could be a RUN_NAME, but for its length."""
    return re.fullmatch(r"[\w\-][\w.\-]*", name) is not None


def on_resume(name: str) -> str:
    """What a change of this setting means to a resumed run: "safe", "curve" or "fixed"."""
    return Config.model_fields[name].json_schema_extra["on_resume"]


class SettingLine(NamedTuple):
    """What the help, `.env.example` and the README say of a setting."""

    section: str
    name: str
    default: str  # empty = none
    meaning: str
    on_resume: str  # safe | curve | fixed


def describe_settings() -> Iterator[SettingLine]:
    """Every setting, in order."""
    for section in SECTIONS:
        for name, field in section.model_fields.items():
            default = "" if field.default is None else str(field.default)
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            meaning = field.description + (f" ({' | '.join(choices)})" if choices else "")
            yield SettingLine(section.__name__.removesuffix("Config"), name.upper(),
                              default.lower() if field.annotation is bool else default, meaning,
                              on_resume(name))
