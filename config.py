"""The settings of the core with their types, defaults and meanings, and the rules between them.

A setting is `MAX_STEPS` in `.env` and the environment, `--max-steps` as a flag, and `max_steps` in JSON,
YAML and as an attribute. `plan/layers.py` reads them. extensions/settings.py adds the settings that only an
extension reads, and their rules. It changes no setting, property or rule of the core.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple, Optional, Union

from pydantic import field_validator

from common.section import Section, by_content, curve, fixed, interval, safe
from common.text import command, counted, is_url, without_passwords

SAMPLE = "data/sample"  # as in presets/sample*.env; scripts/make_sample.py makes it
MAX_NAME_BYTES = 200  # for RUN_NAME; file systems allow 255
PLAIN_NAME = re.compile(r"\w[\w.\-]*")  # for RUN_NAME


class RunConfig(Section):
    """Stage, run folder, start checkpoint and hardware."""

    preset: str = safe("", "named settings (plan/presets/), separated by commas; the last one wins",
                       separator=",")
    training_stage: Literal["pretrain", "sft", "dpo", "grpo"] = fixed(
        "pretrain", "kind of data: text, chats for sft, preference pairs for dpo, prompts for grpo")
    output_dir: str = safe("runs", "folder that holds all runs", min_length=1)
    run_name: Optional[str] = safe(None, "folder of this run in OUTPUT_DIR; none = <stage>-<date-time>")
    resume: str = safe("auto", "auto = newest verified checkpoint of RUN_NAME; never; or a checkpoint's path")
    pretrain_checkpoint: Optional[str] = by_content(
        None, "start from this pretrained model: run, checkpoint, Hugging Face folder or hub name")
    instruct_checkpoint: Optional[str] = by_content(None, "start from this SFT model (same forms)")
    dpo_checkpoint: Optional[str] = by_content(None, "start from this DPO model (same forms)")
    random_init: bool = by_content(False, "allow sft without a start checkpoint, from random weights")
    reset_optimizer: bool = by_content(
        False, "load only the checkpoint's weights, without its optimizer and step")
    start_step: Optional[int] = by_content(
        None, "step number to start from, instead of the checkpoint's", ge=0)
    allow_resume_mismatch: str = safe(
        "", "comma-separated settings that may differ from the checkpoint's", separator=",")
    seed: int = fixed(1337, "random seed for weights, row order, dropout and samples", ge=0, lt=2**32)
    data_seed: Optional[int] = fixed(None, "random seed for the row order alone; none = SEED", ge=0, lt=2**32)
    device: Literal["auto", "cpu", "cuda", "mps"] = safe(
        "auto", "auto = cuda (also ROCm) if available, else mps (Apple), else cpu")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = curve(
        "auto", "dtype of matmuls; master weights stay fp32; auto = bf16 if the hardware runs it fast")
    tf32: bool = curve(True, "allow TensorFloat-32 in fp32 matmuls on CUDA")
    deterministic: bool = safe(False, "use deterministic CUDA kernels: exact resume, but slower")
    reproducible: bool = fixed(
        False, "compute the same bits on any number of ranks, with any SHARDING; slightly slower")
    compile: bool = safe(
        True, "use torch.compile if a compiler is available; default on a CPU: only for large models")
    extensions: str = safe(
        "forecast,cpu_kernels,waiting,exclude,online,report,card,trackers,reproducible,rounding,guards,"
        "evaluate,profile",
        "modules of extensions/ that the run calls; default,NAME adds NAME to these", separator=",")
    debug: bool = safe(
        False, "report the first module whose output is not finite (slow); alone: --preset debug")
    distributed_timeout: float = safe(600, "seconds without progress before a hung job exits", gt=0)
    world_size: int = safe(1, "process count, set by torchrun; with --check, the number to plan for", ge=1)
    device_memory: Optional[float] = safe(
        None, "memory of each GPU in GB (10^9 bytes) for --check; none = this machine's GPUs", gt=0)
    sharding: Literal["none", "full", "hybrid"] = safe(
        "none", "shard the model: not, over all ranks, or within groups of SHARD_DEGREE ranks")
    shard_degree: int = safe(0, "ranks per model copy with SHARDING=hybrid; 0 = one machine's ranks", ge=0)
    cpu_offload: bool = safe(False, "keep sharded weights and optimizer state in host memory; slow")


class DataConfig(Section):
    """Input files and rows."""

    pretrain_data_path: Optional[str] = by_content(
        None, "prepared text, mixture, or token files; ./paddock train also prepares text and hub datasets")
    sft_data_path: Optional[str] = by_content(None, "prepared chats")
    dpo_data_path: Optional[str] = by_content(None, "prepared preference pairs")
    grpo_data_path: Optional[str] = by_content(None, "prepared prompts")
    validation_data_path: Optional[str] = safe(
        None, "validation set of the stage (same forms as its data); none = what the data holds out")
    cache_dir: Optional[str] = safe(
        None, "folder for cached results; none = beside the data, or OUTPUT_DIR if that is read-only")
    hellaswag_path: Optional[str] = safe(None, "HellaSwag items (.jsonl, .parquet, ...)")
    eval_tasks: Optional[str] = safe(
        None, "more multiple-choice sets, scored as written: name:file,name:file,...", separator=",")
    tokenizer_path: Optional[str] = by_content(None, "tiktoken BPE file, tokenizer.json, run, or hub name")
    tokenizer_backend: Literal["auto", "tiktoken", "huggingface"] = by_content(
        "auto", "tokenizer library; auto = chosen by TOKENIZER_PATH")
    verify_data: Literal["auto", "always"] = safe("auto", "auto = hash only files whose size or time changed")
    document_mask: bool = fixed(True, "prevent attention between a row's documents; positions restart")
    prepare_ahead: bool = fixed(False, "start pretrain or sft on the first shard; prepare others meanwhile")


class PreparationConfig(Section):
    """Preparation of token shards."""

    shard_tokens: int = safe(100_000_000, "tokens per prepared shard", ge=1, lt=2**31)
    validation_fraction: Optional[float] = safe(
        None, "fraction held out; none = 0.05 by hash, a tenth of it if 4,000 or more", ge=0, lt=1)
    system_prompt: str = safe("", "system message for chats that have none")
    preparation_workers: int = safe(0, "number of tokenizing processes; 0 = one per core", ge=0)


class ModelConfig(Section):
    """The model's shape and kernels."""

    model_type: Literal["llama", "qwen2", "qwen3", "mistral", "smollm3"] = fixed(
        "llama", "family; qwen2 adds biases to q, k, v; qwen3 normalizes each head's q, k")
    depth: Optional[int] = by_content(
        None, "number of layers; also sets width, heads, batch, steps and rate, unless set explicitly",
        ge=1, le=64)
    dim: int = fixed(768, "width of the residual stream", ge=1, le=1 << 20)
    n_layers: int = fixed(12, "number of transformer blocks", ge=1, le=65_536)
    train_only: Optional[str] = curve(None, "train only these layers, such as 1,3; no LoRA, no SHARDING")
    n_heads: int = fixed(12, "number of query heads", ge=1, le=65_536)
    n_kv_heads: int = fixed(4, "number of key/value heads (grouped-query attention)", ge=1)
    head_width: Optional[int] = fixed(None, "width of an attention head; none = DIM / N_HEADS", ge=2)
    ffn_dim: Optional[int] = by_content(None, "feed-forward width; none = from the next two settings", ge=1)
    multiple_of: int = by_content(256, "round the feed-forward width up to a multiple of this", ge=1)
    ffn_dim_multiplier: Optional[float] = by_content(
        None, "multiplier of the feed-forward width, 8/3 DIM", gt=0)
    norm_eps: float = fixed(1e-5, "epsilon of RMSNorm", gt=0)
    rope_theta: float = fixed(500_000.0, "base of the rotary embedding", gt=0)
    no_rope_every: Optional[int] = fixed(
        None, "every n-th layer has no rotary embedding (smollm3: 4); none = all have it", ge=1)
    sliding_window: Optional[int] = fixed(
        None, "number of tokens, with itself, that a token attends to; none = all", ge=1)
    sliding_every: int = fixed(1, "SLIDING_WINDOW limits every n-th layer; 1 = all layers", ge=1)
    rope_scaling_type: Literal["llama3", "linear", "yarn"] = fixed("llama3", "kind of RoPE scaling")
    rope_scaling_factor: Optional[float] = fixed(None, "factor of RoPE scaling; none = off", ge=1)
    rope_low_freq_factor: float = fixed(
        1.0, "RoPE scaling stretches pairs with fewer rotations than this", gt=0)
    rope_high_freq_factor: float = fixed(
        4.0, "RoPE scaling keeps pairs with more rotations than this; yarn: 32", gt=0)
    rope_original_max_len: int = fixed(8192, "context length before RoPE scaling", ge=1)
    dropout: float = curve(
        0.0, "dropout on embeddings and on the outputs of attention and feed-forward, in training",
        ge=0, lt=1)
    tie_embeddings: bool = fixed(True, "share one matrix between embedding and head")
    init_std: float = by_content(
        0.02, "std of initial weights; residual projections use this / sqrt(2 N_LAYERS)", gt=0)
    init_copy: bool = by_content(
        False, "start attention heads that copy what they attend to: WO is WV transposed")
    attention_backend: Literal["auto", "flash", "cudnn", "sdpa", "math"] = safe(
        "auto", "attention kernel; auto = the fastest available, on a CPU our own `blocks` and `grouped`")
    activation_checkpointing: Literal["none", "selective", "block"] = safe(
        "none", "recompute activations: per block, or selectively by ACTIVATION_MEMORY_BUDGET")
    activation_memory_budget: float = safe(
        0.9, "share of activations kept by selective checkpointing; the cheapest are recomputed", ge=0, le=1)
    head_chunk_tokens: int = safe(0, "tokens per chunk of logits; 0 = chosen by vocabulary size", ge=0)

    @property
    def head_dim(self) -> int:
        return self.head_width or self.dim // self.n_heads

    @property
    def layer_kinds(self) -> list[tuple[bool, bool]]:
        """Of each layer, whether SLIDING_WINDOW limits it and whether it has a rotary embedding."""
        return [(self.sliding_window is not None and number % self.sliding_every == 0,
                 self.no_rope_every is None or number % self.no_rope_every != 0)
                for number in range(1, self.n_layers + 1)]

    @property
    def hidden_dim(self) -> int:
        """Feed-forward width. Source: Llama 3's reference model."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        width = int((self.ffn_dim_multiplier or 1.0) * int(2 * 4 * self.dim / 3))
        return max(1, -(-width // self.multiple_of)) * self.multiple_of

    @property
    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a block's weights in the model's order; of linear layers (outputs, inputs)."""
        heads, kv_heads, wide = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim, self.hidden_dim
        biases = {"attention.bq": (heads,), "attention.bk": (kv_heads,), "attention.bv": (kv_heads,)}
        norms = {"attention.q_norm": (self.head_dim,), "attention.k_norm": (self.head_dim,)}
        return {"attention.wq": (heads, self.dim), "attention.wk": (kv_heads, self.dim),
                "attention.wv": (kv_heads, self.dim), "attention.wo": (self.dim, heads),
                **{"qwen2": biases, "qwen3": norms}.get(self.model_type, {}),
                "feed_forward.w1": (wide, self.dim), "feed_forward.w2": (self.dim, wide),
                "feed_forward.w3": (wide, self.dim),
                "attention_norm": (self.dim,), "ffn_norm": (self.dim,)}

    def parameter_shapes(self, vocab_rows: int) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every parameter, in the model's order."""
        vocabulary, shapes = (vocab_rows, self.dim), {}
        for layer in range(self.n_layers):
            shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in self.block_shapes.items()}
        head = {} if self.tie_embeddings else {"output.weight": vocabulary}
        return {"tok_embeddings.weight": vocabulary, **shapes, "norm.weight": (self.dim,), **head}

    @property
    def matrix_count(self) -> int:
        sizes = [math.prod(shape) for shape in self.block_shapes.values() if len(shape) == 2]
        return self.n_layers * sum(sizes)


def padded(vocab_size: int) -> int:
    """Round `vocab_size` up to a multiple of 128 rows of embedding and head, for fast matmuls."""
    return -(-vocab_size // 128) * 128


# Settings that describe a model and come with a checkpoint. Three of them set the feed-forward width.
FEED_FORWARD = ("ffn_dim", "ffn_dim_multiplier", "multiple_of")
SHAPE_SETTINGS = ("model_type", "dim", "n_layers", "n_heads", "n_kv_heads", "head_width",
                  "tie_embeddings")  # fixed by the weights
SCALING_SETTINGS = ("rope_scaling_factor", "rope_scaling_type", "rope_low_freq_factor",
                    "rope_high_freq_factor", "rope_original_max_len")
FREE_SETTINGS = ("norm_eps", "rope_theta", "no_rope_every", "sliding_window", "sliding_every",
                 *SCALING_SETTINGS)  # the weights of a model do not show them
MODEL_SETTINGS = (*SHAPE_SETTINGS, *FEED_FORWARD, *FREE_SETTINGS, "init_std")


class OptimConfig(Section):
    """Batch, length of the run, and optimizer."""

    total_batch_size: int = fixed(
        524_288, "tokens per step over all ranks; determines gradient accumulation", ge=1)
    micro_batch_size: int = safe(8, "rows per forward pass on one rank; 0 = all rows of the rank", ge=0)
    max_seq_len: int = fixed(1024, "tokens per row; default for sft and dpo: at most the start model's", ge=1)
    max_steps: int = curve(1000, "total number of optimizer steps", ge=0)
    stop_step: Optional[int] = safe(
        None, "save and exit after this step; the same command without it continues to MAX_STEPS", ge=1)
    epochs: Optional[float] = safe(
        None, "passes over the training data; replaces MAX_STEPS; without either: sft 3, dpo 1", gt=0)
    optimizer: Literal["adamw", "muon"] = fixed("adamw", "muon = Muon for block matrices, AdamW for the rest")
    learning_rate: float = curve(6e-4, "peak learning rate", gt=0)
    learning_rate_factors: Optional[str] = curve(
        None, "pattern:factor,... multiplies the rate of parameters, such as tok_embeddings*:0.2,*norm*:3",
        separator=",")
    min_learning_rate: Optional[float] = curve(None, "final learning rate; none = LEARNING_RATE / 10", ge=0)
    warmup_steps: Union[int, float] = curve(100, "steps of linear warm-up; below 1, their share", ge=0)
    lr_schedule: Literal["cosine", "wsd", "constant"] = curve("cosine", "wsd = warm-up, stable, linear decay")
    decay_fraction: float = curve(0.2, "fraction of MAX_STEPS used for the decay of wsd", gt=0, le=1)
    weight_decay: float = curve(0.1, "weight decay of matrices", ge=0)
    adam_beta1: float = curve(0.9, "decay of AdamW's first moment", ge=0, lt=1)
    adam_beta2: float = curve(0.95, "decay of AdamW's second moment", ge=0, lt=1)
    adam_eps: float = curve(1e-8, "AdamW's epsilon", gt=0)
    muon_momentum: float = curve(0.95, "decay of Muon's momentum; 0.8 for runs of 200 steps", ge=0, lt=1)
    max_grad_norm: float = curve(1.0, "clip the gradient to this norm; 0 = only measure it", ge=0)
    gradient_dtype: Literal["fp32", "bf16"] = curve(
        "fp32", "dtype of gradient exchange; bf16 halves the traffic but rounds")
    loss_spike_policy: Literal["warn", "skip", "stop"] = curve(
        "warn", "reaction to a loss spike; skip = skip the update, stop = exit before it")
    loss_spike_threshold: float = curve(8.0, "size of a loss spike in robust standard deviations", gt=0)
    weight_dtype: Literal["fp32", "bf16"] = fixed(
        "fp32", "dtype of matrices; bf16 = stochastic rounding, no fp32 copy, 2 bytes a gradient; no LoRA")
    optimizer_dtype: Literal["fp32", "bf16"] = fixed(
        "fp32", "dtype of the optimizer's state of matrices; bf16 = stochastic rounding; no LoRA")
    update_in_backward: Union[bool, Literal["false", "true", "clipped"]] = curve(
        False, "update a matrix when its gradient is complete, and free that; a bad step is not undone; "
        "clipped = clip by the norm of the step before", union_mode="left_to_right")
    loss_spike_window: ClassVar[int] = 128  # recent losses to compare with

    @property
    def special_update(self) -> bool:
        """Whether extensions/rounding.py updates the weights: in bf16, or during the backward pass."""
        return self.weight_dtype == "bf16" or self.optimizer_dtype != "fp32" or bool(self.update_in_backward)

    @property
    def final_learning_rate(self) -> float:
        return self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate

    @property
    def rate_factors(self) -> list[tuple[str, float]]:
        """LEARNING_RATE_FACTORS as patterns with their factors. Raises ValueError."""
        entries = [entry.strip().rpartition(":") for entry in (self.learning_rate_factors or "").split(",")]
        return [(pattern, float(factor)) for pattern, _, factor in entries if pattern or factor]

    @property
    def rows_per_step(self) -> int:
        return self.total_batch_size // self.max_seq_len


class EvaluationConfig(Section):
    """Evaluation during training."""

    validate_every: int = interval(15, 250, "validations; 0 = never")
    validation_rows: int = curve(256, "number of held-out rows to evaluate; always the same ones", ge=1)
    hellaswag_every: int = safe(500, "steps between evaluations of HellaSwag and EVAL_TASKS; 0 = never", ge=0)
    hellaswag_examples: int = curve(0, "number of items per set, from the start of the file; 0 = all", ge=0)
    hellaswag_name: str = safe("HellaSwag", "display name for the items in HELLASWAG_PATH")
    early_stopping_patience: int = curve(0, "validations without a new best before stopping; 0 = never", ge=0)
    early_stopping_skip_steps: int = curve(0, "number of initial steps that early stopping ignores", ge=0)


class CheckpointConfig(Section):
    """When checkpoints are written, and which are kept."""

    save_every: int = interval(3, 500, "checkpoints; 0 = only after the last step")
    async_save: bool = safe(True, "write checkpoints while training continues; needs a copy in host memory")
    keep_last: int = safe(3, "number of newest checkpoints to keep; 0 = all", ge=0)
    keep_best: int = safe(1, "also save and keep as many checkpoints with the lowest validation loss", ge=0)
    keep_every: int = safe(
        0, "also save and keep the checkpoint of every N-th step, for at-step; 0 = none", ge=0)


class LogConfig(Section):
    """Logs."""

    log_every: int = interval(30, 10, "lines on the console and in metrics.jsonl; 0 = never")
    log_all_ranks: bool = safe(False, "print the lines of all ranks on the console, not only rank 0's")
    ledger_checksum: bool = safe(
        False, "write a checksum of the weights after each step into ledger.jsonl; on with REPRODUCIBLE")


# Linear layers of a block with Hugging Face's names, in the model's order.
LINEAR_LAYERS = {"attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
                 "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
                 "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
                 "feed_forward.w3": "mlp.up_proj"}
LORA_LAYERS = {name.split(".")[1]: hf_name.split(".")[1] for name, hf_name in LINEAR_LAYERS.items()}
ALL_LINEAR = "all-linear"  # PEFT's name for all of these


class LoraConfig(Section):
    """Low-rank adapters."""

    used_if = ("lora_enabled", True)
    lora_enabled: bool = fixed(False, "train only low-rank adapters on the start checkpoint")
    lora_rank: int = fixed(16, "rank of the adapters", ge=1)
    lora_alpha: float = fixed(32.0, "scale of the adapters: alpha / rank", gt=0)
    lora_rslora: bool = fixed(False, "scale the adapters by alpha / sqrt(rank) instead of alpha / rank")
    lora_dropout: float = fixed(0.0, "dropout on the adapters' inputs", ge=0, lt=1)
    lora_target_modules: str = fixed(
        ",".join(LORA_LAYERS), "comma-separated layers to adapt; all-linear and q_proj etc. also work",
        separator=",")
    lora_train_head: bool = fixed(False, "also train the whole head")
    lora_train_embeddings: bool = fixed(False, "also train the whole embedding")
    lora_train_tokens: str = fixed(
        "auto", "token rows to train too: auto = tokens new to the base, none, or control tokens")
    lora_base_quantization: Literal["none", "int8", "nf4"] = fixed("none", "quantize the base (bitsandbytes)")

    @field_validator("lora_target_modules")
    @classmethod
    def use_internal_names(cls, names: str) -> str:
        """Normalize LORA_TARGET_MODULES to internal names in the model's order."""
        internal = {hf_name: name for name, hf_name in LORA_LAYERS.items()}
        layers = {internal.get(name, name) for name in map(str.strip, names.split(",")) if name}
        if ALL_LINEAR in layers:
            layers = layers - {ALL_LINEAR} | {*LORA_LAYERS}
        return ",".join([*filter(layers.__contains__, LORA_LAYERS), *sorted(layers - {*LORA_LAYERS})])


class PreferenceConfig(Section):
    """Training on preference pairs."""

    used_if = ("training_stage", "dpo")
    preference_objective: Literal["dpo", "orpo", "simpo", "kto"] = fixed(
        "dpo", "loss on pairs; orpo and simpo need no reference; kto trains on unpaired answers")
    pair_truncation: Literal["keep_end", "keep_start", "drop"] = fixed(
        "keep_end", "how to cut pairs longer than a row: keep the end of the prompt and the start of both "
        "answers, or the start of both texts; drop = leave out pairs whose texts do not fit into one row")
    dpo_loss: Literal["sigmoid", "ipo", "hinge"] = fixed("sigmoid", "DPO's loss of the reward margin")
    dpo_beta: float = fixed(0.1, "strength of the pull toward the reference model", gt=0)
    dpo_label_smoothing: float = fixed(0.0, "assumed fraction of swapped pairs (sigmoid only)", ge=0, lt=0.5)
    dpo_length_normalised: bool = fixed(False, "use log-probabilities per token instead of per answer")
    dpo_sft_weight: float = fixed(0.0, "weight of an additional cross-entropy on the chosen answer", ge=0)
    dpo_reference: Literal["auto", "stored", "live"] = safe(
        "auto", "stored = computed once; live = frozen copy or base; auto = live with LoRA, else stored")
    kto_desirable_weight: float = fixed(1.0, "weight of KTO's loss of good answers", ge=0)
    kto_undesirable_weight: float = fixed(1.0, "weight of KTO's loss of bad answers", ge=0)
    orpo_lambda: float = fixed(0.1, "weight of ORPO's odds-ratio term", gt=0)
    simpo_beta: float = fixed(2.0, "scale of SimPO's rewards, which are log-probabilities per token", gt=0)
    simpo_gamma: float = fixed(1.0, "SimPO's target reward margin; half of SIMPO_BETA is common", ge=0)


class DistillationConfig(Section):
    """Distillation from a teacher model."""

    used_if = ("distillation_enabled", True)
    distillation_enabled: bool = fixed(
        False, "also train on a teacher's distribution; in grpo only on it, at the student's own answers")
    teacher_model: Optional[str] = by_content(
        None, "teacher: run, checkpoint, or Hugging Face folder or name")
    teacher_precision: Literal["auto", "bf16", "fp32"] = fixed("auto", "teacher's dtype; auto = as stored")
    distillation_loss: Literal["forward_kl", "reverse_kl", "jsd"] = fixed(
        "forward_kl", "divergence between teacher and student")
    distillation_jsd_beta: float = fixed(0.5, "weight of the teacher in the mixture of jsd", gt=0, lt=1)
    distillation_weight: float = fixed(0.5, "share of the divergence; the rest is cross-entropy", ge=0, le=1)
    distillation_lambda: float = fixed(
        1.0, "in grpo: share of micro-batches of own answers; the rest has the records' answers", ge=0, le=1)
    distillation_temperature: float = fixed(2.0, "temperature of both distributions", gt=0)


START_FROM = ("pretrain_checkpoint", "instruct_checkpoint", "dpo_checkpoint")
LOCAL_PATHS = ("output_dir", "cache_dir", "resume", "pretrain_data_path", "sft_data_path", "dpo_data_path",
               "grpo_data_path", "validation_data_path", "hellaswag_path")
NAMES_OR_PATHS = ("tokenizer_path", "teacher_model", *START_FROM)
# Kinds of prepared data: the setting with their path, and the script that prepares them.
KINDS = {"documents": ("PRETRAIN_DATA_PATH", "scripts/load_pretrain_dataset.py"),
         "chats": ("SFT_DATA_PATH", "scripts/load_instruct_dataset.py"),
         "pairs": ("DPO_DATA_PATH", "scripts/load_dpo_dataset.py"),
         "prompts": ("GRPO_DATA_PATH", "scripts/load_prompts_dataset.py")}
KIND_OF_STAGE = dict(zip(("pretrain", "sft", "dpo", "grpo"), KINDS))
STAGE_OF_KIND = {kind: stage for stage, kind in KIND_OF_STAGE.items()}


class EvalTask(NamedTuple):
    """A multiple-choice set in the settings."""

    name: str  # prefix of its metrics
    title: str
    path: str
    setting: str  # the setting with the path, for errors


def extension_module(name: str) -> Optional[ModuleType]:
    """Return a module of extensions/; None if it, or the folder, does not exist."""
    try:
        return import_module(f"extensions.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("extensions", f"extensions.{name}"):
            raise  # it exists, and imports what does not
        return None


CORE_SECTIONS = (RunConfig, DataConfig, PreparationConfig, ModelConfig, OptimConfig, EvaluationConfig,
                 CheckpointConfig, LogConfig, LoraConfig, PreferenceConfig, DistillationConfig)
_of_extensions = extension_module("settings")
EXTENSION_SECTIONS: dict[str, type[Section]] = getattr(_of_extensions, "SECTIONS", {})
EXTENSION_RULES: dict[str, Callable[["Config"], Iterator[str]]] = getattr(_of_extensions, "RULES", {})
SECTIONS = (*CORE_SECTIONS, *EXTENSION_SECTIONS.values())
# Settings of the core that an extension carries out.
SETTINGS_OF_EXTENSIONS = {
    "prepare_ahead": ("prepare_ahead",),
    "rounding": ("weight_dtype", "optimizer_dtype", "update_in_backward"),
    **{extension: (*section.model_fields,) for extension, section in EXTENSION_SECTIONS.items()}}


class Config(*reversed(SECTIONS)):
    """All settings, each under its own name, in the order of the documents. Sections only group them."""

    @field_validator(*LOCAL_PATHS, *NAMES_OR_PATHS)
    @classmethod
    def expand_user(cls, path: Optional[str]) -> Optional[str]:
        """Expand ~, which shells do not expand in files or after `--output-dir=`."""
        return path and os.path.expanduser(path)

    @field_validator("extensions")
    @classmethod
    def in_the_order_of_the_default(cls, names: str) -> str:
        """Replace `default` by its names, and sort the names by its order; others follow."""
        default = cls.model_fields["extensions"].default
        listed = [name.strip() for name in re.sub(r"\bdefault\b", default, names).split(",") if name.strip()]
        return ",".join(dict.fromkeys([*(name for name in default.split(",") if name in listed), *listed]))

    @property
    def needed_extensions(self) -> dict[str, str]:
        """The extensions that settings load without EXTENSIONS, and these settings."""
        preference = self.preference_objective if self.training_stage == "dpo" else "dpo"
        needed = {"PREPARE_AHEAD=true": self.prepare_ahead and "prepare_ahead",
                  "DISTILLATION_ENABLED=true": self.distillation_enabled and "distillation",
                  "LEDGER_CHECKSUM=true": self.ledger_checksum and "checksums",
                  "REWARD": self.training_stage == "grpo" and ":" in self.reward and "reward_code",
                  "REPRODUCIBLE=true": self.reproducible and "checksums",
                  f"PREFERENCE_OBJECTIVE={preference}": preference != "dpo" and "preferences"}
        return {name: setting for setting, name in needed.items() if name}

    @property
    def extension_names(self) -> list[str]:
        names = (*self.extensions.split(","), *self.needed_extensions)
        return [*filter(None, dict.fromkeys(names))]

    @property
    def further_tasks(self) -> list[EvalTask]:
        """The sets in EVAL_TASKS; an entry without a colon has an empty path."""
        entries = [entry.partition(":") for entry in (self.eval_tasks or "").split(",") if entry.strip()]
        return [EvalTask(name.strip(), name.strip(), os.path.expanduser(path.strip()),
                         f"EVAL_TASKS={name.strip()}:") for name, _, path in entries]

    @property
    def row_seed(self) -> int:
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def choice_sets(self) -> list[EvalTask]:
        """All multiple-choice sets: HellaSwag if HELLASWAG_PATH is set, then EVAL_TASKS."""
        first = EvalTask("hellaswag", self.hellaswag_name, self.hellaswag_path or "", "HELLASWAG_PATH=")
        return [first] * bool(first.path) + self.further_tasks

    @property
    def data_path(self) -> Optional[str]:
        return getattr(self, f"{self.training_stage}_data_path")

    @property
    def usual_start(self) -> str:
        return "pretrain_checkpoint" if self.training_stage in ("pretrain", "sft") else "instruct_checkpoint"

    @property
    def start_settings(self) -> list[str]:
        """The settings that name a start checkpoint and are set; this stage's usual one first."""
        return [name for name in dict.fromkeys((self.usual_start, *START_FROM)) if getattr(self, name)]

    @property
    def start_setting(self) -> str:
        """The setting for this stage's start checkpoint: the one that is set, or the usual one."""
        return (self.start_settings or [self.usual_start])[0].upper()

    @property
    def named_checkpoint(self) -> Optional[str]:
        names = self.start_settings if self.resume in ("auto", "never") else ["resume"]
        return next((getattr(self, name) for name in names), None)

    @property
    def answers_per_prompt(self) -> int:
        """Training rows made of each row of the data: GRPO generates several answers to a prompt."""
        return self.grpo_group if self.training_stage == "grpo" and EXTENSION_SECTIONS else 1

    @property
    def rows_read(self) -> int:
        """Rows of the data that a step reads, over all ranks."""
        return self.rows_per_step // self.answers_per_prompt

    @property
    def has_loss_curve(self) -> bool:
        """Whether a higher loss is worse: GRPO's is about 0, whatever the model has learned."""
        return self.training_stage != "grpo" or self.distillation_enabled

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per rank and step; with REPRODUCIBLE, a rank may have one less."""
        return -(-self.rows_per_step // (self.micro_batch_size * self.world_size))

    @property
    def reproducible_micro_batches(self) -> int:
        """Micro-batches in a step over all ranks with REPRODUCIBLE; otherwise 0."""
        return self.rows_per_step // self.micro_batch_size if self.reproducible else 0

    @property
    def planned_ranks(self) -> int:
        """Number of ranks by which unset settings are chosen; with REPRODUCIBLE, not that of this start."""
        return 4 if self.reproducible else self.world_size

    @property
    def ranks_per_copy(self) -> int:
        """Number of ranks that hold one copy of the model together."""
        if self.sharding != "hybrid":
            return self.world_size if self.sharding == "full" else 1
        return self.shard_degree or int(os.environ.get("LOCAL_WORLD_SIZE", min(8, self.world_size)))

    def public(self) -> dict[str, Any]:
        """Return all settings as JSON-like values by name, without passwords in URLs."""
        return {name.upper(): without_passwords(value) if isinstance(value, str) else value
                for name, value in self.model_dump().items()}


# Settings of earlier versions, which runs recorded, and the values with which they had no effect.
DROPPED = {"restart_slow": False, "distillation_top_k": 0, "keep_layers": None, "grow_layers": None,
           "grow_ffn_dim": None, "power_steps": None, "prefetch_steps": 2, "hellaswag_batch_tokens": 16_384,
           "loss_spike_window": 128, "model_language": "", "reward_timeout": 10.0, "wandb_project": "paddock"}
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")  # variables of libraries, not settings


def on_resume(name: str) -> str:
    """Return what a change of this setting does on resume: "safe", "curve", "fixed" or "content" (a path)."""
    return Config.model_fields[name].json_schema_extra["on_resume"]


# ------------------------------------------------------------------------------------ rules between settings


def rules(config: Config, shape_is_unknown: bool = False) -> Iterator[str]:
    """Yield a sentence for every conflict, with all settings involved.

    A model of the hub brings its shape when it is downloaded.
    """
    of_extensions = [EXTENSION_RULES[name] for name in config.extension_names if name in EXTENSION_RULES]
    for topic in (batch_rules, device_rules, path_rules, input_rules, stage_rules, *of_extensions):
        yield from topic(config)
    yield from () if shape_is_unknown else shape_rules(config)


def shape_rules(c: Config) -> Iterator[str]:
    """Check the shape of the model."""
    if c.head_dim % 2 and c.head_width:
        yield f"HEAD_WIDTH={c.head_width} must be even; try {c.head_width + 1}"
    elif not c.head_width and (c.dim % c.n_heads or c.head_dim % 2):
        yield (f"DIM={c.dim} must be an even multiple of N_HEADS={c.n_heads}; "
               f"try DIM={max(1, round(c.dim / c.n_heads / 2)) * 2 * c.n_heads}")
    if c.train_only and not {*c.train_only.split(",")} <= {str(layer) for layer in range(c.n_layers)}:
        yield (f"TRAIN_ONLY={c.train_only} must be layers from 0 to {c.n_layers - 1}, separated by commas")
    if c.n_heads % c.n_kv_heads:
        divisors = [str(n) for n in range(1, c.n_heads + 1) if c.n_heads % n == 0]
        yield f"N_KV_HEADS={c.n_kv_heads} must divide N_HEADS={c.n_heads}; try one of {', '.join(divisors)}"
    families = {  # of the attention patterns
        f"SLIDING_WINDOW={c.sliding_window}": (c.sliding_window, "mistral, qwen2, qwen3 or smollm3"),
        f"SLIDING_EVERY={c.sliding_every}": (c.sliding_every > 1, "qwen2, qwen3 or smollm3"),
        f"NO_ROPE_EVERY={c.no_rope_every}": (c.no_rope_every, "smollm3")}
    for setting, (is_used, known) in families.items():
        if is_used and c.model_type not in known:
            yield f"{setting} needs MODEL_TYPE={known}, but it is {c.model_type}; set that, or remove it"
    if c.rope_high_freq_factor <= c.rope_low_freq_factor:
        yield (f"ROPE_HIGH_FREQ_FACTOR={c.rope_high_freq_factor} must exceed "
               f"ROPE_LOW_FREQ_FACTOR={c.rope_low_freq_factor}; raise it")


def batch_rules(c: Config) -> Iterator[str]:
    """Check the batch and the learning rate."""
    # With REPRODUCIBLE, ranks may have unequal numbers of micro-batches.
    shares = 1 if c.reproducible and c.sharding == "none" else c.world_size
    need = c.micro_batch_size * c.max_seq_len * shares
    if c.total_batch_size % need:
        below, above = c.total_batch_size // need * need, -(-c.total_batch_size // need) * need
        fits = not c.total_batch_size % (c.max_seq_len * shares)
        ranks = next(([counted(n, "rank")] for n in range(shares - 1, 0, -1)
                      if c.total_batch_size % (c.micro_batch_size * c.max_seq_len * n) == 0), [])
        ways = ["MICRO_BATCH_SIZE=0, which uses all rows of a step"] * fits + ranks
        other = f", or keep it and use {' or '.join(ways)}" if ways else ""
        yield (f"TOTAL_BATCH_SIZE={c.total_batch_size} must be a multiple of MICRO_BATCH_SIZE * MAX_SEQ_LEN "
               f"* WORLD_SIZE = {c.micro_batch_size} * {c.max_seq_len} * {shares} = {need}; "
               f"try {' or '.join(str(size) for size in (below, above) if size)}{other}")
    if 0 < (count := c.reproducible_micro_batches) < c.world_size:
        yield (f"REPRODUCIBLE=true with MICRO_BATCH_SIZE={c.micro_batch_size} divides a step into "
               f"{counted(count, 'micro-batch')}, too few for WORLD_SIZE={c.world_size}; use at most "
               f"{counted(count, 'rank')}, or start a new run with a lower MICRO_BATCH_SIZE")
    if (c.min_learning_rate or 0) > c.learning_rate:
        yield f"MIN_LEARNING_RATE={c.min_learning_rate} exceeds LEARNING_RATE={c.learning_rate}; lower it"
    try:
        is_valid = all(pattern and 0 < factor < math.inf for pattern, factor in c.rate_factors)
    except ValueError:
        is_valid = False
    if not is_valid:
        yield (f"LEARNING_RATE_FACTORS={c.learning_rate_factors} does not have the form pattern:factor,... "
               "with factors above 0; an example is tok_embeddings*:0.2")
    if c.warmup_steps > 1 and c.warmup_steps % 1:
        yield f"WARMUP_STEPS={c.warmup_steps} must be a whole number, or below 1 a share of the steps"
    if c.early_stopping_patience and not c.validate_every:
        yield "EARLY_STOPPING_PATIENCE needs validations; set VALIDATE_EVERY above 0"


def device_rules(c: Config) -> Iterator[str]:
    """Check precision, compiler and how the model is divided over the ranks."""
    if c.precision == "fp16":  # the loss scale belongs to DDP's float sums
        others = {"DEVICE=cpu": c.device == "cpu", "REPRODUCIBLE=true": c.reproducible,
                  f"SHARDING={c.sharding}": c.sharding != "none",
                  f"WEIGHT_DTYPE={c.weight_dtype}": c.weight_dtype != "fp32",
                  f"OPTIMIZER_DTYPE={c.optimizer_dtype}": c.optimizer_dtype != "fp32",
                  "UPDATE_IN_BACKWARD": c.update_in_backward,
                  "TRAINING_STAGE=grpo": c.training_stage == "grpo"}
        if used := [name for name, is_used in others.items() if is_used]:
            yield (f"PRECISION=fp16 and its loss scale do not work with {' and '.join(used)}; use bf16, or "
                   "fp32")
    if c.activation_checkpointing == "selective" and (c.debug or not c.compile):
        off = "DEBUG=true" if c.debug else "COMPILE=false"
        yield f"ACTIVATION_CHECKPOINTING=selective needs the compiler, but {off}; use block, or none"
    if c.gradient_dtype == "bf16" and c.reproducible:
        yield "GRADIENT_DTYPE=bf16 conflicts with REPRODUCIBLE=true, which sums integers; set it to fp32"
    if c.cpu_offload and (c.sharding == "none" or c.reproducible):
        yield ("CPU_OFFLOAD=true moves sharded weights to the host, which needs SHARDING=full or hybrid, and "
               "REPRODUCIBLE=false; set these, or remove it")
    if c.world_size % c.ranks_per_copy:
        divisors = [str(n) for n in range(1, c.world_size + 1) if c.world_size % n == 0]
        yield (f"SHARDING=hybrid needs a SHARD_DEGREE that divides WORLD_SIZE={c.world_size}, but it is "
               f"{c.ranks_per_copy}{'' if c.shard_degree else ', the ranks of a machine'}; try one of "
               f"{', '.join(divisors)}")
    if c.lora_enabled and c.lora_base_quantization != "none" and c.sharding != "none":
        yield (f"LORA_BASE_QUANTIZATION={c.lora_base_quantization} conflicts with SHARDING={c.sharding}, "
               "because a quantized matrix cannot be divided by rows; set SHARDING=none, since the quantized "
               "base is small, or LORA_BASE_QUANTIZATION=none")


def mps_rules(c: Config) -> Iterator[str]:
    """Yield a sentence for every setting that does not work on Apple's GPUs."""
    working = {"world_size": "1", "sharding": "none", "lora_base_quantization": "none",
               "reproducible": "false", "deterministic": "false", "ledger_checksum": "false",
               "weight_dtype": "fp32", "optimizer_dtype": "fp32", "update_in_backward": "false"}
    used = {name: str(getattr(c, name)).lower() for name in working}
    if c.precision == "fp16":
        working["precision"], used["precision"] = "bf16 or fp32", "fp16"
    for name, value in working.items():
        if used[name] != value:
            yield (f"{name.upper()}={used[name]} does not work on an Apple GPU; set it to {value}, or set "
                   "DEVICE=cpu")


def path_rules(c: Config) -> Iterator[str]:
    """Check that paths are local, and the names of the run and of multiple-choice sets."""
    paths = [(f"{name.upper()}=", getattr(c, name)) for name in (*LOCAL_PATHS, *NAMES_OR_PATHS)]
    for setting, value in (*paths, *((task.setting, task.path) for task in c.further_tasks)):
        if value and is_url(value):
            hub = " or a hub name" if setting[:-1].lower() in NAMES_OR_PATHS else ""
            yield f"{setting}{value} is a URL, but must be a local path{hub}; mount or copy it"
        elif value and re.search(r"\$[\w({]|`", value):
            yield (f"{setting}{value} contains a variable or a command, which is not expanded here; "
                   "write its value (.env expands ${NAME})")
    name = c.run_name or "run"
    size = len(name.encode())
    if c.run_name == "" or not PLAIN_NAME.fullmatch(name) or size > MAX_NAME_BYTES:
        yield (f"RUN_NAME={c.run_name!r:.80} must be a folder name of letters, digits, '_', then '.', '-', "
               f"at most {MAX_NAME_BYTES} bytes (it has {size}); OUTPUT_DIR sets the folder that holds it")
    names = [task.name for task in c.further_tasks]
    for name, _, path, setting in c.further_tasks:
        if not path:
            yield f"EVAL_TASKS={name} does not have the form name:file; an example is arc:data/arc.jsonl"
        elif not re.fullmatch("[a-z][a-z0-9_]*", name):
            yield (f"{setting}{path}: a name starts with a lower-case letter, followed by lower-case "
                   "letters, digits or _; choose another")
        elif names.count(name) > 1 or re.fullmatch("hellaswag|(val|validation|generation)(_.*)?", name):
            yield f"{setting}{path}: {name} is already the name of another metric; choose another"


def input_rules(c: Config) -> Iterator[str]:
    """Check that data, tokenizer and the start checkpoint that a stage needs are set."""
    if c.data_path is None:
        script = command(KINDS[KIND_OF_STAGE[c.training_stage]][1])
        sample = f", or try the embedded sample: {command('scripts/run.py', '--preset', 'sample')}"
        yield (f"{c.training_stage.upper()}_DATA_PATH is not set; prepare data with {script}"
               f"{sample if c.training_stage == 'pretrain' else ''}")
    if c.tokenizer_path is None:
        start = "start from a model that has one (PRETRAIN_CHECKPOINT), or " * (c.training_stage == "sft")
        yield (f"TOKENIZER_PATH is not set; {start}set it to Llama 3's tokenizer.model or a tokenizer.json, "
               f"or train one with {command('scripts/train_tokenizer.py')}")
    if c.named_checkpoint is not None:
        return
    may_be_random = c.training_stage == "sft" and (c.random_init or c.distillation_enabled)
    if c.lora_enabled or c.training_stage != "pretrain" and not may_be_random:
        feature = "LORA_ENABLED=true" if c.lora_enabled else f"TRAINING_STAGE={c.training_stage}"
        random = ", or RANDOM_INIT=true to train random weights" * (feature == "TRAINING_STAGE=sft")
        yield (f"{feature} needs a start checkpoint, but the settings name none; set {c.usual_start.upper()} "
               f"to the model to fine-tune{random}")


def stage_rules(c: Config) -> Iterator[str]:
    """Check that the stage supports the features."""
    checkpoints = [name.upper() for name in c.start_settings]
    if c.random_init and checkpoints:
        yield f"RANDOM_INIT=true conflicts with {checkpoints[0]}; remove one of them"
    needed = {"online": c.training_stage == "grpo" and "TRAINING_STAGE=grpo", **c.needed_extensions,
              "rounding": c.special_update and "WEIGHT_DTYPE, OPTIMIZER_DTYPE or UPDATE_IN_BACKWARD"}
    for extension, setting in needed.items():
        if setting and not EXTENSION_SECTIONS:
            yield f"{setting} needs extensions/{extension}.py, which does not exist"
    if c.train_only and (c.lora_enabled or c.sharding != "none"):
        other = "LORA_ENABLED=true" if c.lora_enabled else f"SHARDING={c.sharding}"
        yield f"TRAIN_ONLY={c.train_only} does not work with {other}; remove one of them"
    if c.lora_enabled and (unknown := {*c.lora_target_modules.split(",")} - LORA_LAYERS.keys()):
        known = ", ".join([*LORA_LAYERS, *LORA_LAYERS.values(), ALL_LINEAR])
        yield f"LORA_TARGET_MODULES: unknown {', '.join(sorted(unknown))}; use some of {known}"
    if c.training_stage == "dpo" and c.dpo_loss != "sigmoid" and c.dpo_label_smoothing:
        yield f"DPO_LABEL_SMOOTHING works with DPO_LOSS=sigmoid, not with {c.dpo_loss}"
