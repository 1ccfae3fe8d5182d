"""Run prepare_step and loss_sum of each objective and family on fake GPU tensors, and count copies and waits.

It needs a CUDA build of torch, but no GPU. Fake tensors have a shape, a dtype and a device, but no values, so
their backward cannot run; tensors on the CPU are real. The exit code is 1 if a case has other counts than in
EXPECTED, or mixes devices.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import lora  # noqa: E402
from common.command_line import CommandParser  # noqa: E402
from common.errors import SettingsError, run_script  # noqa: E402
from config import Config  # noqa: E402
from dataloaders import Batch  # noqa: E402
from extensions.online import GRPO  # noqa: E402
from learn import objectives  # noqa: E402
from learn.teacher import LlamaTeacher  # noqa: E402
from model import Transformer  # noqa: E402
from model_kernels import attention  # noqa: E402
from model_kernels.head import IGNORE_INDEX  # noqa: E402

GPU, ROWS, LENGTH, VOCAB = torch.device("cuda", 0), 2, 256, 500
SHAPE = dict(dim=256, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=512, max_seq_len=LENGTH,
             micro_batch_size=ROWS, total_batch_size=ROWS * LENGTH, compile=False)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mistral": dict(sliding_window=64),
    "smollm3": dict(sliding_window=64, sliding_every=2, no_rope_every=2)}
KERNELS = {"causal": "flash", "documents": "varlen", "window": "varlen", "mask": "efficient"}
# By case: (copies to the GPU, waits for it) in `prepare_step`, if there is one, and in `loss_sum`
EXPECTED: dict[str, list[tuple[int, int]]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "SFT", "SFT with LoRA and new tokens"), [(2, 0)]),
    **dict.fromkeys(("mistral", "smollm3"), [(3, 0)]), **dict.fromkeys(("dpo", "orpo", "simpo"), [(4, 0)]),
    "dpo, live reference": [(7, 0)], "kto": [(16, 1), (4, 0)], "kto, live reference": [(19, 1), (4, 0)],
    "GRPO, answers": [(0, 0)], "GRPO, answers to shared prompts": [(2, 0)], "distillation": [(4, 0)]}
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class Gpu(TorchDispatchMode):
    """Computes with fake tensors what is on the GPU; records copies to it, and why the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        self.pinned: dict[int, Tensor] = {}  # by address; kept, so that no other tensor gets it
        self.copies = 0
        self.waits: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        target = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
        if "cuda" not in {target.type, *(each.device.type for each in tensors)}:
            return function(*args, **kwargs)
        source = args[name == "copy_"] if name in ("_to_copy", "copy_") else None
        if source is not None and source.device.type != target.type:
            is_async = kwargs.get("non_blocking") or args[2:3] == (True,)
            self.copies += target.type == "cuda"
            if target.type == "cpu" or not (is_async and source.untyped_storage().data_ptr() in self.pinned):
                self.wait(f"copy to {target.type}")
            if target.type == "cpu":
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        elif name in READS or name in INDEXING and any(
                index is not None and (index.dtype == torch.bool or not index.is_cuda) for index in args[1]):
            self.wait(name)
            if name == "_local_scalar_dense":
                return 1
        with self.fake:
            return function(*args, **kwargs)

    def wait(self, why: str) -> None:
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()]
        self.waits.append(f"{why} at " + [place for place in places if place.startswith(f"{ROOT}/")
                                          and "packages" not in place and "host_waits" not in place][-1])


def pretend(gpu: Gpu) -> None:
    """Replace what asks the driver, and what reads values of fake tensors."""
    def pin_memory(tensor: Tensor, *_) -> Tensor:
        pinned = tensor.clone()
        gpu.pinned[pinned.untyped_storage().data_ptr()] = pinned
        return pinned

    def make(data: Any, *args, device: Any = None, **options) -> Tensor:
        made = make_tensor(data, *args, **options)
        return made if device is None else made.to(device)

    make_tensor, torch.tensor = torch.tensor, make
    Tensor.pin_memory = pin_memory
    Tensor.is_pinned = lambda tensor: tensor.untyped_storage().data_ptr() in gpu.pinned
    fake_tensor.FakeTensor.tolist = lambda tensor: tensor.cpu().tolist()
    torch.cuda._lazy_init = fake_tensor.init_gpu_context = lambda *_: None
    torch._C._ensureCUDADeviceGuardSet()
    attention._choose = lambda purpose, *_: KERNELS[purpose]
    if torch.__version__ < "2.12":  # whose fake addmm does not know out_dtype
        torch.addmm = lambda added, *_, out, **__: out.copy_(added)
    # The choice between torch's own kernels asks the driver.
    F.scaled_dot_product_attention = lambda q, *_, **__: q.clone()


def model_of(config: Config) -> Transformer:
    with torch.device(GPU):
        return Transformer(config, VOCAB, torch.bfloat16)


def batch_of(kind: str) -> Batch:
    """Return rows on the GPU, as a step gets them."""
    tokens_BT, index_M, stored = torch.randint(VOCAB, (ROWS, LENGTH)), None, {}
    targets_BT, documents_BT = tokens_BT.clone(), torch.arange(LENGTH).expand(ROWS, -1).int() // 32
    if kind == "pairs":
        stored = {"reference_BP2": torch.zeros(ROWS, 4, 2), "label_BP": torch.ones(ROWS, 4).long()}
    elif "answers" in kind:
        stored = {"advantage_BT": torch.zeros(ROWS, LENGTH), "length_BT": torch.ones(ROWS, LENGTH)}
    if kind != "text":
        targets_BT[:, ::2] = IGNORE_INDEX
        index_M = (targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten()
    if kind != "answers to shared prompts":  # whose prompts are documents 0
        documents_BT = None if kind == "answers" else documents_BT + 1
    return Batch(tokens_BT, targets_BT, documents_BT, index_M, stored).to(GPU)


def losses(objective: Any, kind: str, config: Config,
           model: Optional[Transformer] = None) -> Iterator[Callable]:
    model, batches = model or model_of(config), [batch_of(kind)]
    if hasattr(objective, "prepare_step") and not isinstance(objective, GRPO):  # GRPO generates its answers
        yield lambda: batches.extend(objective.prepare_step(batches, 0).batches)
    yield lambda: objective.loss_sum(model, batches[-1])


def cases() -> Iterator[tuple[str, Iterator[Callable]]]:
    """Yield the name of each case, and the functions to count."""
    plain, config = objectives.NextToken(), Config(**SHAPE)
    for family, changes in FAMILIES.items():
        yield family, losses(plain, "text", Config(**SHAPE, model_type=family, **changes))
    yield "SFT", losses(plain, "chats", config)
    adapted = model_of(Config(**SHAPE, lora_enabled=True, lora_dropout=0.1))
    lora.add_adapters(adapted, adapted.config, torch.Generator(), {"tok_embeddings": [1, 2, 3]})
    lora.cast_base(adapted, torch.bfloat16)
    yield "SFT with LoRA and new tokens", losses(plain, "chats", config, adapted)
    for name, cls in objectives.PREFERENCE_OBJECTIVES.items():
        paired = Config(**SHAPE, training_stage="dpo", preference_objective=name)
        yield name, losses(cls(paired, objectives.stored_reference, model_of(paired)), "pairs", paired)
        if cls.needs_reference:
            live = partial(objectives.frozen_logprobs, model_of(paired))
            yield f"{name}, live reference", losses(cls(paired, live, model_of(paired)), "pairs", paired)
    online = Config(**SHAPE, training_stage="grpo", grpo_group=2, grpo_beta=0.1)
    live = partial(objectives.frozen_logprobs, model_of(online), compute=objectives.token_logprobs)
    for kind in ("answers", "answers to shared prompts"):
        yield f"GRPO, {kind}", losses(GRPO(online, None, live), kind, online)
    distilled = Config(**SHAPE, distillation_enabled=True)
    teacher = LlamaTeacher(model_of(distilled), VOCAB)
    yield "distillation", losses(objectives.Distillation(distilled, teacher), "chats", distilled)


def main() -> None:
    CommandParser(__doc__).parse_args()
    if torch.version.cuda is None:
        raise SettingsError(f"torch {torch.__version__} is not a CUDA build; install one to run this")
    gpu, faults = Gpu(), 0
    pretend(gpu)
    with gpu:
        for name, stages in cases():
            counts, reasons = [], []
            try:
                for stage in stages:
                    gpu.copies, gpu.waits = 0, []
                    stage()
                    counts.append((gpu.copies, len(gpu.waits)))
                    reasons += gpu.waits
            except Exception as error:  # of any class: fake tensors have several
                traceback.print_exc()
                reasons.append(f"{type(error).__name__}: {error}".splitlines()[0])
            if counts != EXPECTED.get(name):
                faults += 1
                reasons.append(f"should be {EXPECTED.get(name)}")
            print(f"{name}: {counts}", *reasons, sep="\n    ", flush=True)
    raise SystemExit(faults > 0)


if __name__ == "__main__":
    run_script(main)
