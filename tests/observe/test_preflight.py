import re
import shutil

import pytest
from factories import UNMEASURED, TinyRun, flip_bit
from safetensors.torch import load_file

import train
from checkpoint import store
from common.errors import SettingsError
from extensions import cost
from extensions import forecast as check
from plan.layers import read_preset
from plan.make import make_plan
from plan.names import validate
from tokenizer import load_tokenizer

NAMES = ["settings", "hardware", "batch", "tokenizer", "model", "length", "data", "example", "evaluation", "start", "memory",
         "disk", "speed"]


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory) -> TinyRun:
    """A run that has taken four of six steps, with its checkpoints."""
    run = TinyRun(prepared, tmp_path_factory.mktemp("trained"), HELLASWAG_EVERY=0, SAMPLE_EVERY=0)
    assert run.train(MAX_STEPS=4) == 0
    return run


class Checked:
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
    checked = Checked(run := TinyRun(prepared, tmp_path / "runs"), capsys)
    assert (checked.code, checked.err) == (0, "") and checked.out.startswith("Ready to train.\n")
    assert checked.lines[0][2] == f"{len(make_plan(run.argv(), {}).sources)} set, all valid", "--check is none of them"
    assert checked.marks() == dict.fromkeys(NAMES, "ok")
    assert list(tmp_path.iterdir()) == []


def test_bad_data_exits_with_3_and_the_other_checks_still_run(prepared, tmp_path, capsys):
    shards = shutil.copytree(prepared.shards, tmp_path / "shards")
    flip_bit(next(shards.glob("train-*.bin")))
    checked = Checked(TinyRun(prepared, tmp_path), capsys, PRETRAIN_DATA_PATH=shards, HELLASWAG_PATH=tmp_path / "none.jsonl")
    assert checked.code == 3 and checked.err == "2 problems found.\n"
    assert {name for name, mark in checked.marks().items() if mark == "FAIL"} == {"data", "evaluation"}
    assert "train-00000.bin" in checked.text("FAIL") and "HELLASWAG_PATH" in checked.text("FAIL")


@pytest.mark.parametrize("mode", ["dpo-live", "distilled", "lora-sft"])
def test_the_forecast_is_what_a_run_computes_and_saves(mode, stages, tmp_path, capsys, monkeypatch):
    optimizer = "muon" if mode in ("distilled", "lora-sft") else "adamw"
    run = stages.run(mode, tmp_path, MAX_STEPS=1, PEAK_TFLOPS=1, OPTIMIZER=optimizer, **UNMEASURED)
    plans, plan_steps = [], check.plan_steps
    monkeypatch.setattr(check, "plan_steps", lambda *facts: plans.append(plan_steps(*facts)) or plans[-1])
    texts = dict((name, text) for _, name, text in Checked(run, capsys).lines)
    plan, _ = plans[0]
    assert run.train() == 0
    saved = sum(tensor.nbytes for file in run.checkpoint(1).glob("*.safetensors") for tensor in load_file(file).values())
    assert plan.checkpoint_bytes == pytest.approx(saved, rel=0.02)
    step = run.metrics()[-1]
    assert plan.needed == pytest.approx(768 * step["mfu"] * 1e12 / step["tokens_per_second"], rel=1e-6)
    assert ("Chinchilla" in texts["length"]) == (mode == "distilled"), "it is about random weights and all of them"
    if mode == "lora-sft":
        for length, lost in ((96, True), (512, False)):
            warned = Checked(run, capsys, MAX_SEQ_LEN=length, TOTAL_BATCH_SIZE=8 * length).text("warn")
            found = re.findall(rf"(\d+) examples do not fit into MAX_SEQ_LEN={length}: (.*?), unless", " ".join(warned.split()))
            assert [int(total) == sum(map(int, re.findall(r"(\d+) (?:cut|left out)", counts))) > 0 for total, counts in found] == [True] * lost


def test_where_a_model_will_recite_its_data_it_says_so(prepared, tmp_path, capsys):
    """185 rows of 32 targets; the border is at 1,000 trained parameters for each target and pass, and at eight passes."""
    def texts(run, **changes) -> str:
        checked = Checked(run, capsys, VALIDATE_EVERY=0, **changes)
        assert checked.code == 0, checked.out
        return " ".join(checked.text("warn").split())

    run = TinyRun(prepared, tmp_path, TOTAL_BATCH_SIZE=128, DIM=32, **UNMEASURED)
    parameters = int(re.search(r"([\d,]+) parameters", Checked(run, capsys).text("ok"))[1].replace(",", ""))
    border = 1000 / (parameters / (185 * 32)) * 185 / 4  # steps
    assert "expect it to recite" not in texts(run, MAX_STEPS=int(0.98 * border))
    assert f"expect it to recite: it trains {parameters / (185 * 32):,.0f} parameters for each target, and sees that" in texts(
        run, MAX_STEPS=int(1.02 * border))
    large = {"DIM": 256, "FFN_DIM": 1024}
    assert "recite" not in texts(run, MAX_STEPS=int(7.9 * 185 / 4), **large) and "recite" in texts(run, MAX_STEPS=int(8.1 * 185 / 4), **large)


def test_a_plan_for_other_machines_needs_neither_data_nor_a_tokenizer(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--preset", "llama3-8b", "--check", "--device-memory", "80", "--world-size", "8"]

    def planned(*more: str) -> str:
        assert train.main([*flags, *more]) == 0
        return capsys.readouterr().out

    out = planned()
    assert "PRETRAIN_DATA_PATH is not set" in out and "TOKENIZER_PATH is not set" in out and "FAIL" not in out
    assert "8,030,261,248 parameters" in out and "a GPU of 80 GB has 74.5" in out and out.startswith("The plan fits, but")
    assert len(steps := re.findall(r"20 per parameter need MAX_STEPS=(\d+)\n", out)) == 1
    assert " 20.00 per parameter" in (out := planned("--max-steps", *steps)) and "few tokens" not in out
    out = planned("--tokenizer-path", "nowhere.model", "--pretrain-data-path", "nowhere")
    assert "warn  tokenizer: TOKENIZER_PATH=nowhere.model: there is no file" in out and "8,030,261,248" in out
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(SystemExit):
        train.main(flags[:3])
    assert "PRETRAIN_DATA_PATH is not set" in capsys.readouterr().err, "without a plan for others they are needed"


def test_sharding_within_a_machine_is_named_where_it_fits_and_is_faster(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def planned(*more: str) -> str:
        assert train.main(["--preset", "llama3-8b", "--check", "--world-size", "16", *more]) == 0
        return capsys.readouterr().out

    def slowest(out: str) -> float:
        return float(re.search(r"speed: ([\d,]+) to", out)[1].replace(",", ""))

    full, hybrid = planned("--device-memory", "80"), planned("--device-memory", "80", "--sharding", "hybrid")
    found = re.search(r"SHARDING=hybrid also fits: communication takes ([\d.]+) s of a step instead of ([\d.]+) s\n", full)
    saved = 2**20 / slowest(full) - 2**20 / slowest(hybrid)  # where none of the communication is hidden
    assert float(found[2]) - float(found[1]) == pytest.approx(saved, abs=0.02) and "also fits" not in hybrid
    narrow = ("--device-memory", "40", "--micro-batch-size", "1")
    assert "also fits" not in planned(*narrow), "where hybrid needs 42 GiB"


def test_a_ring_takes_the_time_of_the_formula():
    config = validate(read_preset("llama3-8b", "").values)[0].model_copy(update={"sharding": "full", "world_size": 16, "micro_batch_size": 1,
                                                                                "total_batch_size": 16 * 8192, "max_seq_len": 8192})
    block = (8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096) // 32  # without embedding, head and norms
    one, = (each for each in cost.exchanged(config, 128_256) if each.bytes == block * 2)
    # 64 blocks gathered over 16 GPUs of 2 machines: the ring enters a machine through 8 cards; 14 near hops and a far one.
    assert one.seconds == pytest.approx(64 * (block * 2 * 15 / 16 / 320e9 + 14 * 3.4e-6 + 14e-6 + 8.4e-6))


def test_memory_that_is_not_there_ends_with_2_and_a_way_out(prepared, tmp_path, capsys, monkeypatch):
    run = TinyRun(prepared, tmp_path, ACTIVATION_CHECKPOINTING="block")
    fits = make_plan(run.argv(MICRO_BATCH_SIZE=4), {}).config
    room = check.forecast_memory(fits, load_tokenizer(str(prepared.tokenizer)).vocab_size, 4, "cpu").total
    for share, mark in ((1.1, "ok"), (1.07, "warn"), (1, "warn")):
        monkeypatch.setattr(check.os, "sysconf", lambda name, share=share: int(share * room) if name == "SC_PHYS_PAGES" else 1)
        checked = Checked(run, capsys, MICRO_BATCH_SIZE=4)
        assert (checked.code, checked.marks()["memory"]) == (0, mark)
    assert re.fullmatch(r"tight: about .* Forecasts are good to 5 %, so leave 8 % free", checked.text("warn"))
    checked = Checked(run, capsys, MICRO_BATCH_SIZE=8)
    assert (checked.code, checked.marks()["memory"], checked.err) == (2, "FAIL", "1 problem found.\n") and "Ready" not in checked.out
    assert "With the same global batch, it would fit with MICRO_BATCH_SIZE=4 " in checked.text("FAIL")
    assert Checked(run, capsys, DEVICE_MEMORY=1e-6, DEVICE="cuda").code == 2, "as on a planned GPU"


def test_a_disk_without_room_and_a_folder_that_is_none_end_with_5(prepared, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    checked = Checked(TinyRun(prepared, tmp_path / "a" / "b"), capsys)
    assert checked.code == 5 and "OUTPUT_DIR" in checked.text("FAIL") and list(tmp_path.iterdir()) == []
    plan = make_plan(TinyRun(prepared, tmp_path).argv(), {})
    size = check.plan_steps(plan, plan.config, None, 300, None)[0].checkpoint_bytes
    config = make_plan(TinyRun(prepared, tmp_path).argv(SAVE_EVERY=1, KEEP_LAST=0), {}).config
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 * size))
    with pytest.raises(SettingsError, match="up to 6 checkpoints at a time, .* keep fewer .KEEP_LAST=0"):
        check.describe_disk(config, size)
    assert "up to 3 checkpoints" in check.describe_disk(config.model_copy(update={"keep_last": 1}), size)
    with pytest.raises(SettingsError, match="up to 5 checkpoints"):  # those of steps 3 and 6, too
        check.describe_disk(config.model_copy(update={"keep_last": 1, "keep_every": 3}), size)
    earlier = tmp_path / config.run_name / "checkpoints" / "step-00000002"
    earlier.mkdir(parents=True)
    (earlier / "model.safetensors").write_bytes(bytes(3 * size))
    assert "up to 6 checkpoints" in check.describe_disk(config, size), "what this run has saved is not needed again"


@pytest.mark.parametrize(("settings", "most"), [
    ({"MAX_STEPS": 8, "SAVE_EVERY": 3}, 4), ({"MAX_STEPS": 12, "SAVE_EVERY": 2}, 5),
    ({"MAX_STEPS": 8, "SAVE_EVERY": 1, "KEEP_LAST": 1, "KEEP_EVERY": 4, "KEEP_BEST": 0}, 4), ({"SAVE_EVERY": 0}, 1)])
def test_the_forecast_of_checkpoints_is_what_a_run_has_on_disk(settings, most, tiny_run, monkeypatch):
    """The run's loss falls, so each validation saves, too."""
    run, counts, prune = tiny_run(**{"KEEP_LAST": 3, "KEEP_BEST": 1, "VALIDATE_EVERY": 4, "ASYNC_SAVE": "false", **settings}), [], store.prune

    def counted(folder, *arguments, **options):
        counts.append(len([*folder.glob("step-*")]))
        return prune(folder, *arguments, **options)

    monkeypatch.setattr(store, "prune", counted)
    run.trained()
    assert max(counts) <= check.most_checkpoints(make_plan(run.argv(), {}).config) == most
    assert max(counts) >= most - 1, "the best one is often among the newest"
