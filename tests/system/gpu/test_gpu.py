"""On CUDA, every kernel, compiled or not, gives the results of a CPU, and runs survive the faults that can happen there.

`pytest -m gpu` runs it on a GPU. PADDOCK_TEST_DEVICE=cpu takes the CPU in its place, for all but what only CUDA has: so the same
lines run where there is no GPU. What is cheap there runs in every test run. scripts/gpu/suite.py chooses by how names begin.
"""

import dataclasses
import json
import os
import time
import warnings
from functools import partial
from itertools import count

import faults
import pytest
import torch
import torch.distributed as dist
from factories import UNMEASURED, TinyRun, assert_same_run, do_in_step, is_rank, run_ranks
from torch.nn import functional as F

import model_utils
import train
from common.errors import SettingsError
from extensions.inference.engine import RowCache, generate
from hellaswag_utils import Task, ending_logprobs
from learn.optim import in_ddp
from model_kernels.attention import SHARED_PREFIX
from model_kernels.head import IGNORE_INDEX
from model_utils import build_model, compile_model
from parallel import ranks as collectives
from parallel.ranks import Ranks
from scripts.gpu.probe import (
    APART,
    LENGTH,
    ROWS,
    SHAPE,
    VOCAB,
    batch_on,
    distance,
    documents,
    learned,
    model_on,
    random_tokens,
)

GPU = os.environ.get("PADDOCK_TEST_DEVICE", "cuda")
CPU_TOO = ["cpu", pytest.param(GPU, marks=pytest.mark.gpu, id="gpu")]
ONLY_GPU = [pytest.param(GPU, marks=pytest.mark.gpu, id="gpu")]
on_both = pytest.mark.parametrize("device", CPU_TOO, indirect=True)
on_gpu = pytest.mark.parametrize("device", ONLY_GPU, indirect=True)  # too slow, or useless, in every test run
pytestmark = pytest.mark.filterwarnings("default")  # compilers, and kernels that are tried, give many harmless warnings

BACKENDS = ("auto", "cudnn", "flash", "sdpa", "math")


@pytest.fixture
def device(request) -> torch.device:
    """The device of the test; skips the test if this machine lacks it."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA here; PADDOCK_TEST_DEVICE=cpu runs this on the CPU")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device(request.param)


def needs_cuda(device: torch.device, why: str) -> None:
    if device.type != "cuda":
        pytest.skip(f"needs CUDA: {why}")


def compile_once(device: torch.device, wanted: bool) -> None:
    """On a CPU only one test compiles."""
    if device.type != "cuda" and not wanted:
        pytest.skip("compiled once on a CPU, elsewhere")


def assert_alike(one, other, allowed: float) -> None:
    """Compare losses and gradients, relative to the norm of each tensor."""
    assert distance(one, other) <= allowed


def reference(document_ids_BT: torch.Tensor | None = None):
    """The result of the math kernel on a CPU in float32."""
    cpu = torch.device("cpu")
    return learned(model_on(cpu, attention_backend="math"), batch_on(cpu, document_ids_BT))


@on_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["whole rows", "documents"])
def test_values_are_those_of_a_cpu_in_float32(device, dtype, apart):
    numbers = documents() if apart else None
    assert_alike(learned(model_on(device, dtype), batch_on(device, numbers)), reference(numbers), APART[dtype])


@on_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [64, 0])
def test_values_of_the_head_are_those_of_cross_entropy_in_float64(device, dtype, chunk):
    model = model_on(device, dtype, head_chunk_tokens=chunk)
    generator = torch.Generator().manual_seed(3)
    hidden_MD = torch.randn(ROWS * LENGTH, SHAPE["dim"], generator=generator).to(device, dtype)
    targets_M = torch.randint(VOCAB, (ROWS * LENGTH,), generator=generator)
    targets_M[::5] = IGNORE_INDEX
    actual = hidden_MD.clone().requires_grad_()
    total = -model.logprobs(actual, targets_M.to(device), mode="sum")
    total.backward()
    exact = hidden_MD.double().cpu().requires_grad_()
    weight = model.head_matrix.weight.detach().to(dtype).double().cpu().requires_grad_()
    expected = F.cross_entropy((exact @ weight.T)[:, :VOCAB], targets_M, ignore_index=IGNORE_INDEX, reduction="sum")
    expected.backward()
    assert abs(float(total.detach()) - float(expected.detach())) <= APART[dtype] / 10 * float(expected.detach())
    for result, other in ((actual.grad, exact.grad), (model.head_matrix.weight.grad, weight.grad)):
        assert (result.double().cpu() - other).norm() <= APART[dtype] * other.norm()


def an_item() -> Task:
    context, endings = [5] * 30, [4, 9, 6, 3]
    ids = torch.randint(VOCAB, (len(context) + sum(endings),), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    numbers = [SHARED_PREFIX] * len(context) + [number for number, length in enumerate(endings, 1) for _ in range(length)]
    targets = torch.cat([torch.full((len(context),), IGNORE_INDEX, dtype=torch.int32), ids[len(context):]])
    return Task(ids, torch.tensor(numbers, dtype=torch.int32), targets, endings, endings, 0, False)


@on_both
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recomputed", ["none", "block", "selective"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_every_backend_in_every_use(device, backend, recomputed, compiled):
    """Training with and without documents, HellaSwag with a shared prefix, and generation with a cache, by one model."""
    if recomputed == "selective" and (not compiled or backend != "auto"):
        pytest.skip("selective is the compiler's, whatever the kernel")
    if compiled:
        compile_once(device, False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        model = model_on(device, dtype, attention_backend=backend, activation_checkpointing=recomputed)
        if compiled:
            compile_model(model)
        found = [learned(model, batch_on(device, numbers)) for numbers in (documents(), None)]
    except (SettingsError, RuntimeError) as error:
        if isinstance(error, SettingsError) or (device.type == "cpu" and "kernel" in str(error)):
            pytest.skip(f"{backend}: {str(error)[:150]}")
        raise
    for one, numbers in zip(found, (documents(), None)):
        assert_alike(one, reference(numbers), APART[dtype])
    exact = model_on(torch.device("cpu"), attention_backend="math")
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        scores, expected = (ending_logprobs(each, [an_item()] * 2, where)
                          for each, where in ((model, device), (exact, torch.device("cpu"))))
        assert abs(scores - expected).max() <= APART[dtype] * abs(expected).max()
        logits, expected = cached_logits(model, device), cached_logits(exact, torch.device("cpu"))
        assert (logits - expected).abs().max() <= APART[dtype] * expected.abs().max()
        written = generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=4)
        assert [len(ids) for ids in written] == [4, 4]


def cached_logits(model, device: torch.device) -> torch.Tensor:
    """The logits of the last token of two rows of a cache of three, with the earlier ones in the cache."""
    ids = random_tokens(2, 11).to(device)
    cache = RowCache(model.config, 3, 16, device, model.compute_dtype)
    with torch.no_grad():
        model(ids[:, :8], cache=cache.at([0, 2], [0, 0]), mode="logits")
        last_M = torch.tensor([3, 7], device=device)
        return model(ids[:, 8:], cache=cache.at([0, 2], [8, 8]), target_index_M=last_M, mode="logits").cpu()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_compiled_is_eager(device, dtype):
    """Any number of documents needs only a few compilations."""
    compile_once(device, dtype == torch.float32)
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    eager, model = model_on(device, dtype), model_on(device, dtype)
    compile_model(model)
    for every in (7, 5, 3, 2, 1) if device.type == "cuda" else (7, 2):
        numbers = documents()
        numbers[1] = torch.arange(LENGTH) // every + 1
        assert_alike(learned(model, batch_on(device, numbers)), learned(eager, batch_on(device, numbers)), APART[dtype])
    graphs = counters["stats"]["unique_graphs"]
    print(f"\nmeasured: graphs compiled, {dtype} = {graphs}")
    assert graphs <= 6  # a block, with a static and a dynamic number of borders, and the parts of the head


@on_gpu
def test_compiled_steps_wait_once_for_the_device(device, tiny_run):
    """A step with documents reads from the device once, after its update is enqueued; the loop between steps never does."""
    needs_cuda(device, "there is nothing to wait for")
    waits: list[int] = []
    original = train.learning_rate

    def counted(finished: int, config) -> float:
        waits.append(sum("synchronizing" in str(warning.message) for warning in caught))
        return original(finished, config)

    run = tiny_run(**UNMEASURED, DEVICE="cuda", PRECISION="bf16", COMPILE="true", MAX_STEPS=12, SAVE_EVERY=0, LOG_EVERY=0)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(train, "learning_rate", counted)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            assert run.train() == 0
        finally:
            torch.cuda.set_sync_debug_mode("default")
    steps = [after - before for before, after in zip(waits[4:], waits[5:])]  # the first ones compile
    print(f"\nmeasured: waits a step, most = {max(steps)}")
    where = {f"{os.path.basename(warning.filename)}:{warning.lineno}" for warning in caught
             if "synchronizing" in str(warning.message)}
    assert max(steps) <= 1, f"{steps}, from {sorted(where)}"


@on_gpu
@pytest.mark.slow
def test_compiled_adapters_learn_preferences_beside_a_live_reference(device, stages, tmp_path):
    """The blocks are compiled with and without adapters and gradients, for rows of many documents."""
    compile_once(device, False)
    run = stages.run("lora-dpo", tmp_path / "runs", **UNMEASURED, DEVICE=device.type, PRECISION="auto", COMPILE="true",
                     MAX_STEPS=12)
    assert run.train() == 0
    assert len(run.metrics()) == 12


def plant_in_gradients(patch: pytest.MonkeyPatch, step: int, factor: float) -> None:
    """Multiply the gradients of one weight in one step, counted from 1."""
    models, hooks, rate, begun = [], [], train.learning_rate, count(1)

    def build(*arguments):
        models.append(build_model(*arguments))
        return models[-1]

    def learning_rate(updates: int, config) -> float:
        while hooks:
            hooks.pop().remove()
        if next(begun) == step:
            hooks.append(models[0].norm.weight.register_hook(lambda gradient: gradient * factor))
        return rate(updates, config)

    patch.setattr(model_utils, "build_model", build)
    patch.setattr(train, "learning_rate", learning_rate)


def scale_of(run: TinyRun, step: int) -> float:
    return json.loads((run.checkpoint(step) / "trainer_state.json").read_text())["scaler"]["scale"]


@on_both
def test_faults_of_fp16_skip_a_step_halve_the_scale_and_survive_a_resume(device, tiny_run, monkeypatch):
    """On a CPU, where the settings refuse fp16, the check is patched away."""
    if device.type == "cpu":
        scaler = torch.amp.GradScaler
        monkeypatch.setattr(model_utils, "choose_dtype", lambda *_: torch.float16)
        monkeypatch.setattr(torch.amp, "GradScaler", lambda *_: scaler("cpu", init_scale=2.0**10))
    precision = {"DEVICE": "cuda", "PRECISION": "fp16"} if device.type == "cuda" else {}
    run = tiny_run(**UNMEASURED, **precision, SAVE_EVERY=1, KEEP_LAST=0, MAX_STEPS=6)
    with monkeypatch.context() as patch:
        plant_in_gradients(patch, 4, float("inf"))
        assert run.train() == 0
    assert [line["updated"] for line in run.lines("ledger")][3:] == [False, True, True]
    assert scale_of(run, 4) == scale_of(run, 3) / 2 == scale_of(run, 6)
    again = tiny_run(**{**run.settings, "RUN_NAME": "again", "RESUME": run.checkpoint(4)}).trained()
    assert scale_of(again, 6) == scale_of(run, 6)
    if device.type == "cpu":
        assert_same_run(again, run, 6, logs=())


@on_both
def test_faults_that_are_no_numbers_end_with_4(device, tiny_run, monkeypatch, capfd):
    run = tiny_run(**UNMEASURED, DEVICE=device.type)
    plant_in_gradients(monkeypatch, 3, float("nan"))
    assert run.train() == 4
    assert "became NaN in step 3. Step 2 is saved." in capfd.readouterr().err
    assert run.steps_saved() == [2]


@on_gpu
def test_faults_of_memory_give_their_sentence(device, tiny_run, capfd):
    needs_cuda(device, "a CPU's is not limited so")
    torch.cuda.empty_cache()
    run = tiny_run(**UNMEASURED, DEVICE="cuda", DIM=2048, N_HEADS=16, N_KV_HEADS=16, N_LAYERS=8)
    torch.cuda.set_per_process_memory_fraction(0.005)
    try:
        assert run.train() == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    message = capfd.readouterr().err
    assert "out of memory" in message and "MICRO_BATCH_SIZE" in message and "Traceback" not in message


@on_both
def test_faults_leave_a_deterministic_run_the_same_to_the_bit(device, tiny_run):
    """Stopped by TERM and resumed, in new processes, because cuBLAS reads its setting at the start."""
    changes = {"DEVICE": device.type, "PRECISION": "bf16", "DETERMINISTIC": "true", "SAVE_EVERY": 3,
               "COMPILE": str(device.type == "cuda").lower(), **UNMEASURED}
    runs = [tiny_run(**changes, RUN_NAME=name) for name in ("straight", "stopped")]
    runs[0].ends([0])
    runs[1].ends([143], partial(faults.stop_in_step, 5, 0))
    runs[1].ends([0])
    assert_same_run(*runs, 6, logs=())


def over_gloo() -> None:
    """Two ranks on one GPU, with gloo, because nccl refuses that. The watchdog starts as with nccl."""
    join = collectives._init_process_group
    collectives._init_process_group = lambda ranks, *others: join(
        dataclasses.replace(ranks, device=torch.device("cpu")), *others)


def drifting() -> None:
    def drift() -> None:
        if is_rank(1):
            with torch.no_grad():
                models[0].layers[1].attention.wq.weight[0, 0] += 1e-3

    over_gloo()
    models, build = [], model_utils.build_model
    model_utils.build_model = lambda *arguments: models.append(build(*arguments)) or models[0]
    do_in_step(3, drift)


def hanging() -> None:
    over_gloo()
    if is_rank(1):
        do_in_step(3, lambda: time.sleep(180))


TIMEOUT = {"cpu": 5, "cuda": 15}  # seconds; on CUDA the first step is slow
ONE_GPU = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@on_gpu
def test_ranks_that_share_a_device_learn_what_one_does(device, tiny_run):
    one, two = (tiny_run(**UNMEASURED, DEVICE=device.type, TF32="false", DRIFT_CHECK_EVERY=2, RUN_NAME=name)
                for name in ("one", "two"))
    assert one.train() == 0
    two.ends([0, 0], over_gloo, env=ONE_GPU)
    for actual, other in zip(one.lines("ledger"), two.lines("ledger"), strict=True):
        assert actual["rows_crc32"] == other["rows_crc32"]
        assert other["loss"] == pytest.approx(actual["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(actual["grad_norm"], rel=1e-4)


@on_gpu
def test_ranks_that_drift_are_found(device, tiny_run):
    text = tiny_run(**UNMEASURED, DEVICE=device.type, DRIFT_CHECK_EVERY=3).ends([1, 1], drifting, env=ONE_GPU)
    assert "layers.1.attention.wq.weight differs between rank 0 and rank 1" in text


@on_gpu
def test_ranks_that_hang_are_reported(device, tiny_run):
    job = tiny_run(**UNMEASURED, DEVICE=device.type, DISTRIBUTED_TIMEOUT=TIMEOUT[device.type]).start(2, hanging, ONE_GPU)
    codes = job.wait(120)
    assert set(codes) <= {6, 1} and 6 in codes, job.text()
    assert "rank 1 is in data (step 3)" in job.text()


def alone_in_a_group(device_type: str) -> None:
    """The collectives and DDP with its hook, in a real group of one that claims to be one of two, so that the code uses them."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    group = Ranks(0, 0, 2, device)
    assert group.all_agree(True) and group.on_rank0(lambda: {"a": [1, "b"]}) == {"a": [1, "b"]}
    assert float(group.all_reduce_sum(torch.ones(3)).sum()) == 3
    batch, model = batch_on(device, documents()), model_on(device)
    parallel = in_ddp(model)
    assert parallel.device_ids is None  # otherwise DDP moves every argument to the device, and waits for the documents
    if device_type == "cuda":
        compile_model(model)
    assert_alike(learned(parallel, batch), learned(model_on(device), batch), APART[torch.float32])
    dist.destroy_process_group()


@on_gpu
def test_ranks_of_a_group_of_one_with_its_backend(device, tmp_path):
    run_ranks(alone_in_a_group, device.type, world_size=1, folder=tmp_path)
