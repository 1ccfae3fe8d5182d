import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
from factories import UNMEASURED, TinyRun, assert_same_run, contents, flip_bit, prepare
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

import model_utils
from common.errors import SettingsError
from config import Config
from fused import chunked_head
from model import AttentionMeta, Block, Transformer
from settings.load import load_config
from tokenizer import load_tokenizer
from training import memory_estimate, preflight
from training.memory_estimate import activation_bytes, estimate_memory, parameter_count
from training.preflight import GIB, memory_advice

NAMES = ["settings", "hardware", "batch", "tokenizer", "model", "data", "first row", "evaluation", "start", "memory", "disk"]


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory) -> TinyRun:
    """A run of four steps of six, with its checkpoints."""
    run = TinyRun(prepared, tmp_path_factory.mktemp("trained"), HELLASWAG_EVERY=0, SAMPLE_EVERY=0)
    assert run.train(MAX_STEPS=4) == 0
    return run


class Checked:
    """What --check printed, and its exit code."""

    def __init__(self, run: TinyRun, capsys, **changes):
        capsys.readouterr()
        self.code = run.train(CHECK="true", **changes)
        shown = capsys.readouterr()
        self.out, self.err = shown.out, shown.err
        lines = [line for line in self.out.splitlines() if line.startswith("  ")]
        self.lines = [(line[:6].strip(), *line[8:].split(": ", 1)) for line in lines]

    def marks(self) -> dict[str, str]:
        return {name: mark for mark, name, _ in self.lines}

    def text(self, mark: str) -> str:
        return "\n".join(text for own, _, text in self.lines if own == mark)


def test_a_good_run_gets_the_whole_list_and_leaves_no_trace(prepared, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checked = Checked(TinyRun(prepared, tmp_path / "runs"), capsys)
    assert (checked.code, checked.err) == (0, "") and checked.out.endswith("Ready to train.\n")
    assert checked.marks() == dict.fromkeys(NAMES, "ok")
    assert list(tmp_path.iterdir()) == []


def test_the_list_says_what_the_run_will_do(prepared, tmp_path, capsys, monkeypatch):
    run = TinyRun(prepared, tmp_path)
    monkeypatch.setenv("SYSTEM_PROMPT", "Hi")
    told = dict((name, text) for _, name, text in Checked(run, capsys, WORLD_SIZE=2).lines)
    manifest = json.loads((prepared.shards / "manifest.json").read_text())
    tokens = manifest["splits"]["train"]["tokens"]
    assert told["settings"] == "From the environment: SYSTEM_PROMPT=Hi"
    assert told["batch"] == "256 tokens a step = 2 rows x 32 tokens x 2 micro-batches x 2 ranks; 6 steps"
    assert told["data"].startswith(f"{tokens:,} tokens, ") and f"reads them {6 * 256 / tokens:.2f} times" in told["data"]
    assert told["first row"].startswith("'<|begin_of_text|>") and any(noun in told["first row"] for noun in ("cat", "dog", "hen"))
    assert told["evaluation"].startswith("10 questions (HellaSwag) from ")
    assert told["start"] == f"from initial weights, into {run.folder}"
    assert "parameters: 2 layers, dim 32, heads 4/2, feed-forward 96" in told["model"]
    assert all(part in told["memory"] for part in ("parameters", "gradients", "optimizer", "activations", "head"))
    assert "for each of 2 ranks" in told["memory"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("changes", [{"DEVICE": "cuda"}, {"ATTENTION_BACKEND": "flash"}, {"DEVICE": "auto", "PRECISION": "fp16"}])
def test_settings_that_this_machine_cannot_obey_end_with_2(changes, prepared, tmp_path, capsys):
    checked = Checked(TinyRun(prepared, tmp_path), capsys, **changes)
    assert checked.code == 2 and checked.marks()["hardware"] == "FAIL"
    assert any(f"{name}={value}" in checked.text("FAIL") for name, value in changes.items())


class Torch:
    """What DETERMINISTIC sets in torch."""

    def __init__(self):
        self.told = []
        self.backends, self.utils = SimpleNamespace(cudnn=SimpleNamespace(deterministic=False)), SimpleNamespace(
            deterministic=SimpleNamespace(fill_uninitialized_memory=True))

    def use_deterministic_algorithms(self, mode, *, warn_only=False):
        self.told.append((mode, warn_only))


@pytest.mark.parametrize(("wanted", "device", "changed"), [(True, "cuda", True), (True, "cpu", False), (False, "cuda", False)])
def test_deterministic_kernels_are_asked_for_on_cuda_and_nowhere_else(wanted, device, changed, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "none")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(model_utils, "torch", stub := Torch())
    model_utils.make_deterministic(Config(deterministic=wanted), device)
    # With warn_only the backward of torch's attention would stay as it is.
    assert stub.told == [(True, False)] * changed
    assert stub.backends.cudnn.deterministic is changed is not stub.utils.deterministic.fill_uninitialized_memory
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if changed else None)


def test_a_workspace_of_the_users_own_is_kept_or_refused(monkeypatch):
    monkeypatch.setattr(model_utils, "torch", Torch())
    for workspace, refused in ((":16:8", False), (":0:0", True)):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
        with pytest.raises(SettingsError, match="CUBLAS_WORKSPACE_CONFIG.*:0:0") if refused else nullcontext():
            model_utils.make_deterministic(Config(deterministic=True), "cuda")
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == workspace


def test_on_a_cpu_deterministic_is_told_and_changes_no_bit(prepared, tmp_path, capsys):
    runs = [TinyRun(prepared, tmp_path / name, MAX_STEPS=2, DETERMINISTIC=name, **UNMEASURED) for name in ("false", "true")]
    assert [run.train() for run in runs] == [0, 0]
    assert capsys.readouterr().out.count("; deterministic") == 1
    assert_same_run(*runs, 2)
    assert Checked(runs[1], capsys).text("ok").count("; deterministic") == 1


def compiler_that(raises: Exception | None = None, adds: float = 0.0):
    def compile(function):
        def compiled(numbers):
            if raises is not None:
                raise raises
            return function(numbers) + adds
        return compiled
    return compile


@pytest.mark.parametrize(("compiler", "headers", "told"), [
    (compiler_that(), "/", None), (compiler_that(adds=1), "/", "it gives wrong numbers, or set COMPILE=false"),
    (compiler_that(RuntimeError("\nno ptxas\nmore")), "/", "RuntimeError: no ptxas, or set COMPILE=false"),
    (compiler_that(subprocess.CalledProcessError(1, ["gcc"])), "/nowhere", "Python.h.*install python3-dev, or set COMPILE")])
def test_a_kernel_that_cannot_be_compiled_is_found_before_the_first_step(compiler, headers, told, tmp_path, monkeypatch):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(model_utils.sysconfig, "get_path", lambda *_: str(tmp_path) + headers)
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(model_utils.shutil, "which", lambda name: name)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setattr(model_utils, "why_no_kernel", lambda _, real=model_utils.why_no_kernel.__wrapped__: real("cpu"))
    reason = model_utils.why_not_compile(Config(), "cuda")
    assert reason is None if told is None else re.search(told, reason) and "\n" not in reason


def test_bad_data_ends_with_3_and_the_rest_is_told_all_the_same(prepared, tmp_path, capsys):
    shards = shutil.copytree(prepared.shards, tmp_path / "shards")
    flip_bit(next(shards.glob("train-*.bin")))
    checked = Checked(TinyRun(prepared, tmp_path), capsys, PRETRAIN_DATA_PATH=shards, HELLASWAG_PATH=tmp_path / "none.jsonl",
                      PRETRAIN_CHECKPOINT="step-00000009")
    assert checked.code == 3 and checked.err == "3 problems found.\n"
    assert {name for name, mark in checked.marks().items() if mark == "FAIL"} == {"data", "evaluation", "start"}
    assert "train-00000.bin" in checked.text("FAIL") and "HELLASWAG_PATH" in checked.text("FAIL")


@pytest.mark.parametrize("changes, words", [
    ({"PRETRAIN_DATA_PATH": "nowhere"}, "nowhere"), ({"TOKENIZER_PATH": "nowhere.model"}, "nowhere.model"),
    ({"TOTAL_BATCH_SIZE": 2**20, "MICRO_BATCH_SIZE": 1}, "tokens")])
def test_each_kind_of_bad_data_is_named(changes, words, prepared, tmp_path, capsys):
    checked = Checked(TinyRun(prepared, tmp_path), capsys, **changes)
    assert checked.code == 3 and words in checked.text("FAIL")


def test_a_set_made_with_another_tokenizer_is_refused(prepared, tmp_path, capsys):
    other = prepare(tmp_path / "other", seed=1, vocab_size=280)
    checked = Checked(TinyRun(prepared, tmp_path), capsys, TOKENIZER_PATH=other.tokenizer)
    assert checked.code == 3 and "another tokenizer" in checked.text("FAIL")


# Where the run would start


def test_a_run_that_goes_on_says_how_much_is_left(trained, capsys):
    before = contents(trained.output_dir)
    checked = Checked(trained, capsys)
    assert checked.code == 0
    assert f"from {trained.checkpoint(4)}, 2 of 6 steps are left" in checked.text("ok")
    assert "0 of 3 steps are left" in Checked(trained, capsys, MAX_STEPS=3).text("ok")
    assert contents(trained.output_dir) == before


def test_a_change_since_the_checkpoint_ends_with_5(trained, capsys):
    checked = Checked(trained, capsys, SEED=5)
    assert checked.code == 5 and "SEED was 1337, is 5" in checked.text("FAIL")
    allowed = Checked(trained, capsys, SEED=5, ALLOW_RESUME_MISMATCH="SEED")
    assert allowed.code == 0 and "permits: SEED was" in allowed.text("warn")


def test_another_number_of_ranks_is_warned_of(trained, capsys):
    checked = Checked(trained, capsys, WORLD_SIZE=2)
    assert checked.code == 0 and "number of ranks was 1, is 2" in checked.text("warn")


def test_a_checkpoint_of_another_shape_ends_with_5(trained, tmp_path, capsys):
    checked = Checked(trained, capsys, OUTPUT_DIR=tmp_path, PRETRAIN_CHECKPOINT=trained.checkpoint(4), RESET_OPTIMIZER="true",
                      N_LAYERS=3, DIM=64)
    assert checked.code == 5
    assert "DIM is 32 there and 64 here; N_LAYERS is 2 there and 3 here" in checked.text("FAIL")


def test_weights_of_another_run_begin_anew(trained, tmp_path, capsys):
    checked = Checked(trained, capsys, OUTPUT_DIR=tmp_path, PRETRAIN_CHECKPOINT=trained.checkpoint(4), RESET_OPTIMIZER="true")
    assert checked.code == 0 and "start anew" in checked.text("ok") and list(tmp_path.iterdir()) == []


def test_a_missing_or_damaged_checkpoint_ends_with_5(prepared, trained, tmp_path, capsys):
    assert Checked(trained, capsys, PRETRAIN_CHECKPOINT="step-00000099").code == 5
    copy = TinyRun(prepared, tmp_path, HELLASWAG_EVERY=0)
    shutil.copytree(trained.folder, copy.folder)
    for step in copy.steps_saved():
        with open(copy.checkpoint(step) / "model.safetensors", "r+b") as file:
            file.truncate(100)
    checked = Checked(copy, capsys)
    assert checked.code == 5 and "model.safetensors" in checked.out


# Memory and disk


def test_memory_that_is_not_there_is_warned_of_with_a_way_out(prepared, tmp_path, capsys, monkeypatch):
    run = TinyRun(prepared, tmp_path)
    fits = load_config(run.argv(MICRO_BATCH_SIZE=4), {}).config
    room = estimate_memory(fits, load_tokenizer(str(prepared.tokenizer)).vocab_size, 4, "cpu").total
    monkeypatch.setattr(preflight.os, "sysconf", lambda name: room if name == "SC_PHYS_PAGES" else 1)
    assert Checked(run, capsys, MICRO_BATCH_SIZE=4).marks()["memory"] == "ok"
    checked = Checked(run, capsys, MICRO_BATCH_SIZE=8)
    assert checked.code == 0 and checked.marks()["memory"] == "warn"
    assert "It would fit with MICRO_BATCH_SIZE=4 " in checked.text("warn")


def test_the_advice_on_memory_keeps_the_step_and_fits():
    config = Config(micro_batch_size=32)
    forecast = lambda **changes: estimate_memory(config.model_copy(update=changes), 128_256, 2).total
    for rows in (16, 4, 1):
        assert f"MICRO_BATCH_SIZE={rows} (" in memory_advice(config, forecast(micro_batch_size=rows), 128_256, 2)
    rows = {"micro_batch_size": 1}
    assert "ACTIVATION_CHECKPOINTING=selective (" in memory_advice(config, forecast(**rows) - 1, 128_256, 2)
    selective = forecast(**rows, activation_checkpointing="selective")
    assert "ACTIVATION_CHECKPOINTING=block (" in memory_advice(config, selective - 1, 128_256, 2)
    eager = config.model_copy(update={"compile": False})
    assert "ACTIVATION_CHECKPOINTING=block (" in memory_advice(eager, forecast(**rows, compile=False) - 1, 128_256, 2)
    assert "smaller model" in memory_advice(config, GIB, 128_256, 2)


def test_a_disk_without_room_for_a_checkpoint_ends_with_5(prepared, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    checked = Checked(TinyRun(prepared, tmp_path / "a" / "b"), capsys)
    assert checked.code == 5 and "OUTPUT_DIR" in checked.text("FAIL") and list(tmp_path.iterdir()) == []


def test_an_output_folder_that_is_a_file_ends_with_5(prepared, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert Checked(TinyRun(prepared, tmp_path / "file" / "runs"), capsys).code == 5
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    assert Checked(TinyRun(prepared, tmp_path / "runs"), capsys).code == 5, "or a link to nothing"


def test_a_list_that_nobody_reads_on_ends_without_a_word(prepared, tmp_path, capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert TinyRun(prepared, tmp_path / "runs").train(CHECK="true") == 141
    assert capsys.readouterr().err == ""


def test_under_torchrun_one_process_speaks(prepared, tmp_path, capsys, monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    checked = Checked(TinyRun(prepared, tmp_path), capsys)
    assert (checked.code, checked.out, checked.err) == (0, "", "")
    assert os.environ["RANK"] == "1"


@pytest.mark.parametrize("shape", [{"dim": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 768},
                                   {"dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 1, "ffn_dim": 512}])
def test_the_forecast_of_activations_is_near_what_autograd_keeps(shape):
    config, vocab = Config(**shape, micro_batch_size=4, max_seq_len=128, compile=False), 512
    transformer = Transformer(config, vocab)
    transformer.init_weights(torch.Generator().manual_seed(0))
    weights = {parameter.untyped_storage().data_ptr() for parameter in transformer.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(vocab, (4, 128))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        transformer.hidden(tokens, torch.ones(4, 128, dtype=torch.int32))
    measured = sum(storage.nbytes() for storage in kept.values())
    assert 0.75 < estimate_memory(config, vocab, 4).activations / measured < 1.35


def kept_by_the_compiler(config: Config, budget: float) -> float:
    """Bytes a token that a block's compiled graph keeps for its backward, in bf16, by the partitioner's own account."""
    torch._dynamo.reset()
    rows, length, kept = 3, 1100, []  # no weight has this many rows

    def partition(graph, joint, **options):
        forward, backward = min_cut_rematerialization_partition(graph, joint, compiler="inductor", **{
            name: value for name, value in options.items() if name != "compiler"})
        (output,) = [node for node in forward.graph.nodes if node.op == "output"]
        storages = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in
                    (node.meta["val"] for node in output.args[0][1:]) if isinstance(value, torch.Tensor)
                    and (rows * length in value.shape or (length in value.shape and value.shape[0] == rows))}
        kept.append(sum(storages.values()) / (rows * length))
        return forward, backward

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=partition, decompositions=select_decomp_table)
    with FakeTensorMode(allow_non_fake_inputs=True), torch._functorch.config.patch(activation_memory_budget=budget):
        block = Block(config)
        angles = torch.empty(1, length, 1, config.head_dim)
        x_BTD = torch.empty(rows, length, config.dim, dtype=torch.bfloat16, requires_grad=True)
        torch.compile(block, backend=backend, fullgraph=True)(x_BTD, AttentionMeta("sdpa", angles, angles)).sum().backward()
    return kept[0]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("shape", [{"dim": 768, "n_heads": 12, "n_kv_heads": 4, "ffn_dim": 2048},
                                   {"dim": 512, "n_heads": 16, "n_kv_heads": 4, "ffn_dim": 1536}])
def test_the_forecast_of_a_compiled_block_is_what_the_partitioner_keeps(shape):
    config = Config(**shape, activation_checkpointing="selective")

    def forecast(budget: float) -> float:
        return activation_bytes(config.model_copy(update={"activation_memory_budget": budget}), 2)

    for budget in (1.0, 0.9):
        assert kept_by_the_compiler(config, budget) == pytest.approx(forecast(budget), rel=0.01), budget
    assert forecast(0.9) < 0.75 * forecast(1.0)
    for budget in (0.5, 0.0):  # it keeps whole tensors, and views of larger ones
        assert kept_by_the_compiler(config, budget) < 1.15 * forecast(budget), budget


def test_recomputation_saves_most_of_the_activations_of_a_deep_model():
    config = Config(n_layers=32)
    forecast = lambda recompute: estimate_memory(config.model_copy(update={"activation_checkpointing": recompute}), 128, 2)
    assert forecast("block").activations < 0.2 * forecast("none").activations
    assert forecast("block")._replace(activations=0) == forecast("none")._replace(activations=0)


def test_the_forecast_knows_how_many_logits_exist_at_a_time():
    assert memory_estimate.HEAD_CHUNK_BYTES == chunked_head.CHUNK_BYTES
    long = Config(micro_batch_size=64)
    assert estimate_memory(long, 128_256, 4, "cpu").head < estimate_memory(long, 128_256, 4, "cuda").head


def test_the_forecast_of_weights_gradients_and_state_is_exact():
    config = Config(dim=64, n_layers=2, n_heads=4, n_kv_heads=2)
    count = parameter_count(config, 256)
    forecast = estimate_memory(config, 256, 4)
    assert (forecast.parameters, forecast.gradients, forecast.optimizer) == (4 * count, 4 * count, 8 * count)
    assert estimate_memory(config, 256, 2).parameters == 6 * count
