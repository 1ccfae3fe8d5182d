"""Settings that nobody gives: from the run to resume, the prepared data, the start, the stage, the size of the data, and DEPTH."""

import json
import re
from pathlib import Path

import pytest
from factories import checkpoint_without_weights, model_without_weights, rehash

from checkpoint import store
from common.errors import CheckpointError, SettingsError
from config import MODEL_SETTINGS, Config
from plan.derived import settings_of_data, settings_of_length
from plan.make import Plan, make_plan, peek

SFT = ["--training-stage", "sft", "--sft-data-path", "set", "--pretrain-checkpoint", "base", "--tokenizer-path", "t"]
DPO = ["--training-stage", "dpo", "--dpo-data-path", "set", "--instruct-checkpoint", "chat", "--tokenizer-path", "t"]
PRETRAIN = ["--pretrain-data-path", "set", "--tokenizer-path", "t"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model in ("base", "chat"):
        model_without_weights(Path(model))


def load(*flags):
    return make_plan([*map(str, flags)], {})


def save_state(step: int, **settings) -> Path:
    return checkpoint_without_weights(Path("runs/first"), step, {"begun_from": settings.get("PRETRAIN_CHECKPOINT")}, **settings)


def not_used(plan: Plan) -> list[str]:
    lines = [note for note in plan.notes if note.startswith("Not used from ")]
    assert len(lines) <= 1
    return lines[0].partition("RUN_NAME): ")[2].split(", ") if lines else []


def test_a_resumed_run_keeps_what_it_recorded_unless_it_is_given():
    recorded = {"TRAINING_STAGE": "sft", "SFT_DATA_PATH": "set", "TOKENIZER_PATH": "t", "PRETRAIN_CHECKPOINT": "base",
                "LEARNING_RATE": 0.25, "MAX_STEPS": 7, "TOTAL_BATCH_SIZE": 8192, "COMPILE": False, "DEVICE": "cuda"}
    save_state(3, **recorded | {"LEARNING_RATE": 0.5})
    save_state(20, **recorded)
    loaded = load("--run-name", "first", "--max-steps", 9)
    config = loaded.config
    assert (config.training_stage, config.learning_rate, config.total_batch_size, config.max_steps) == ("sft", 0.25, 8192, 9)
    assert (config.pretrain_checkpoint, config.compile, config.device, config.epochs) == ("base", False, "auto", None)
    assert not loaded.deferred and {*loaded.sources} == {"run_name", "max_steps"}
    assert any("LEARNING_RATE=0.25" in note and "step-00000020" in note for note in loaded.notes)
    assert config.model_fields_set & {"power_hz", "extensions", "learning_rate"} == {"learning_rate"}, "nobody chose a default"
    by_path = load("--resume", "runs/first/checkpoints/step-00000003").config
    assert (by_path.learning_rate, by_path.pretrain_checkpoint) == (0.5, None), "it starts from that step"
    assert load(*SFT, "--run-name", "first", "--resume", "never").config.learning_rate == 2e-5
    with pytest.raises(CheckpointError, match="runs/first has a run of TRAINING_STAGE=sft at step-00000020, which TRAINING_STAGE=dpo would"):
        load(*DPO, "--run-name", "first")


def test_a_record_beats_a_preset_for_all_that_is_not_safe(monkeypatch):
    """MUON_MOMENTUM is newer than the run, so its default is what the run had. test_starts.py has the other places of a setting."""
    preset = Path("presets/mine.env").resolve()
    for module in ("layers", "messages"):
        monkeypatch.setattr(f"plan.{module}.PRESETS_DIR", preset.parent)
    preset.parent.mkdir()
    preset.write_text("LEARNING_RATE=0.01\nMUON_MOMENTUM=0.8\nSAVE_EVERY=5\nMICRO_BATCH_SIZE=0\nTOTAL_BATCH_SIZE=8192\n")
    data = {"TOKENIZER_PATH": "t", "PRETRAIN_DATA_PATH": "d", "TOTAL_BATCH_SIZE": 8192}
    checkpoint = save_state(3, PRESET="mine", LEARNING_RATE=0.02, SAVE_EVERY=7, MICRO_BATCH_SIZE=4, **data)
    state = store.read_state(checkpoint)
    state["settings"]["GONE"] = state["settings"].pop("MUON_MOMENTUM")
    rehash(checkpoint, state)
    for name in ("mine", "mine,mine"):
        loaded = load("--preset", name, "--run-name", "first")
        assert (loaded.config.learning_rate, loaded.config.muon_momentum, loaded.config.save_every) == (0.02, 0.95, 5)
        assert not_used(loaded) == ["LEARNING_RATE=0.01", "MUON_MOMENTUM=0.8"]
        assert loaded.config.micro_batch_size == 8, "it is safe, and 0 means all eight rows"
    loaded = load("--preset", "mine", "--run-name", "first", "--learning-rate", 0.03)
    assert loaded.config.learning_rate == 0.03 and not_used(loaded) == ["MUON_MOMENTUM=0.8"]


SFT_RECORD = {"TRAINING_STAGE": "sft", "SFT_DATA_PATH": "set", "TOKENIZER_PATH": "t", "PRETRAIN_CHECKPOINT": "base", "LEARNING_RATE": 0.25,
              "TOTAL_BATCH_SIZE": 8192, "MICRO_BATCH_SIZE": 4, "MAX_STEPS": 7, "DIM": 64, "N_HEADS": 4}
OTHER_ENVS = {  # name -> (.env, flags, what of it is not used, what applies)
    "another stage": ("TRAINING_STAGE=dpo\nDPO_DATA_PATH=pairs\nINSTRUCT_CHECKPOINT=chat\nTOKENIZER_PATH=u\nLEARNING_RATE=1e-6\nMAX_STEPS=20\n"
                      "SEED=7\nMICRO_BATCH_SIZE=2\nRANDOM_INIT=true\nLOG_EVERY=3\nDEVICE=cpu", (),
                      "TRAINING_STAGE=dpo INSTRUCT_CHECKPOINT=chat TOKENIZER_PATH=u LEARNING_RATE=1e-6 SEED=7 RANDOM_INIT=true",
                      {"log_every": 3, "device": "cpu", "max_steps": 20, "micro_batch_size": 2, "dpo_data_path": "pairs"}),
    "the default stage": ("PRETRAIN_DATA_PATH=corpus.txt\nDEPTH=4\nN_HEADS=8", (), "DEPTH=4 N_HEADS=8", {"pretrain_data_path": "corpus.txt", "depth": None}),
    "the same stage": ("SFT_DATA_PATH=other\nDIM=128\nMAX_STEPS=50\nMICRO_BATCH_SIZE=2", (), "SFT_DATA_PATH=other DIM=128",
                       {"max_steps": 50, "micro_batch_size": 2}),
    "a conflict": ("MIN_LEARNING_RATE=0.5\nWEIGHT_DECAY=0.2", (), "MIN_LEARNING_RATE=0.5 WEIGHT_DECAY=0.2", {"weight_decay": 0.1}),
    "what it allows": ("ALLOW_RESUME_MISMATCH=SEED\nSEED=7\nDATA_SEED=8", (), "SEED=7 DATA_SEED=8", {"allow_resume_mismatch": "SEED"}),
    "a teacher": ("TEACHER_MODEL=x", (), "TEACHER_MODEL=x", {"teacher_model": None}),
    "no start": ("INSTRUCT_CHECKPOINT=none\nDPO_CHECKPOINT=", (), "", {"start_settings": ["pretrain_checkpoint"]}),
    "the same values": ("LEARNING_RATE=0.25\nSFT_DATA_PATH=set\nPRETRAIN_CHECKPOINT=base\nTRAINING_STAGE=sft", (), "", {}),
}


@pytest.mark.parametrize("name", OTHER_ENVS)
def test_a_record_beats_env_and_one_line_lists_what_is_not_used(name):
    env, flags, ignored, applies = OTHER_ENVS[name]
    for place in ("set", "t"):
        Path(place).touch()
    save_state(3, **SFT_RECORD)
    Path(".env").write_text(env)
    loaded, values = load("--run-name", "first", *flags), peek(["--run-name", "first", *map(str, flags)])[0]
    kept = {name.lower(): value for name, value in SFT_RECORD.items()} | {"seed": 1337} | applies
    assert {name: getattr(loaded.config, name) for name in kept} == kept
    assert (values["training_stage"], values["sft_data_path"]) == ("sft", "set"), "what ./paddock train prepares"
    assert [each.replace(" (it reads set)", "") for each in not_used(loaded)] == ignored.split()
    assert not ignored or any(note.startswith("Not used from .env, because a flag would be needed") for note in loaded.notes)


def test_a_recorded_value_that_is_no_longer_valid_is_told_and_an_error_if_it_is_fixed():
    checkpoint = save_state(3)
    state = store.read_state(checkpoint)
    rehash(checkpoint, state | {"settings": state["settings"] | {"LR_SCHEDULE": "linear"}})
    loaded = load(*PRETRAIN, "--run-name", "first")
    assert loaded.config.lr_schedule == "cosine"
    assert any(re.search("LR_SCHEDULE=linear: expected .* no longer accepts it, and continues with LR_SCHEDULE=cosine", line)
               for line in loaded.warnings)
    by_flag = "set DISTILLATION_LOSS by a flag with ALLOW_RESUME_MISMATCH=DISTILLATION_LOSS, "
    for name, value, remedy in (("MODEL_TYPE", "gpt", ""), ("DISTILLATION_LOSS", "mse", by_flag)):
        rehash(checkpoint, state | {"settings": state["settings"] | {name: value}})
        with pytest.raises(CheckpointError, match=f"step-00000003: {name}={value}: .* that recorded it, {remedy}or use another checkpoint"):
            load(*PRETRAIN, "--run-name", "first")
    fixed = load(*PRETRAIN, "--run-name", "first", "--distillation-loss", "jsd")
    assert fixed.config.distillation_loss == "jsd", "the remedy gets past the plan; check_changes then compares"


@pytest.mark.parametrize("flags, rate, epochs", [
    (SFT, 2e-5, 3), ([*SFT, "--lora-enabled"], 2e-4, 3), (DPO, 1e-6, 1), ([*DPO, "--lora-enabled"], 1e-5, 1),
    ([*SFT, "--max-steps", 9, "--learning-rate", 0.5], 0.5, None), ([*SFT, "--num-train-epochs", 2], 2e-5, 2),
    ([*SFT, "--instruct-checkpoint", "chat"], 2e-5, 3)])
def test_the_stage_decides_what_is_not_given(flags, rate, epochs):
    loaded = load(*flags)
    assert (loaded.config.learning_rate, loaded.config.epochs) == (rate, epochs)
    assert {"total_batch_size", "warmup_steps", "compile"} <= {*loaded.deferred}
    assert ("max_steps" in loaded.deferred) == (epochs is not None)


def test_a_narrow_start_gets_a_higher_rate():
    """muP: the rate scales with 1 / width, and that of SFT by more."""
    model_without_weights(Path("base"), dim=256)
    assert load(*SFT, "--lora-enabled").config.learning_rate == 2e-4 * 2048 / 256
    loaded = load(*SFT)
    assert loaded.config.learning_rate == pytest.approx(2e-5 * (2048 / 256) ** 1.4, rel=0.02)
    assert "TRAINING_STAGE=sft and DIM=256 set LEARNING_RATE=0.00037, EPOCHS=3" in " ".join(loaded.notes)


@pytest.mark.parametrize("stage, rows, ranks, batch_rows", [
    ("sft", 20, 1, 1), ("sft", 200, 1, 4), ("sft", 200, 8, 8), ("sft", 29_000, 1, 64), ("sft", 29_000, 6, 66), ("dpo", 10_000, 4, 64),
    ("pretrain", 263, 1, 8), ("pretrain", 1_000_000, 1, 512)])
def test_the_batch_suits_the_data_and_the_ranks(stage, rows, ranks, batch_rows):
    before = Config(training_stage=stage, world_size=ranks, epochs=3.0)
    names = ("total_batch_size", "micro_batch_size", "max_steps", "warmup_steps")
    config = before.model_copy(update=settings_of_data(before, rows, names))
    assert config.rows_per_step == batch_rows and config.rows_per_step % (config.micro_batch_size * ranks) == 0
    assert config.max_steps == -(-3 * rows // batch_rows) and config.warmup_steps == min(100, config.max_steps // 10)


@pytest.mark.parametrize("total, micro", [(1024, 1), (3072, 3), (8192, 8), (16_384, 8), (17_408, 1)])
def test_a_batch_alone_decides_how_many_rows_are_read_at_a_time(total, micro):
    before = Config(training_stage="sft", max_seq_len=1024, total_batch_size=total, epochs=3.0)
    assert settings_of_data(before, 200, ("micro_batch_size",))["micro_batch_size"] == micro
    model_without_weights(Path("base"))
    assert load(*SFT, "--max-seq-len=1024", f"--total-batch-size={total}").config.total_batch_size == total, "no rule of the default of 8 refuses it"


def test_the_tokenizer_is_that_of_the_data_or_of_the_start():
    Path("data/one").mkdir(parents=True)
    Path("data/mix").mkdir()
    assert load("--check", "--world-size", 2, "--pretrain-data-path", "data/one").config.tokenizer_path is None
    Path("of-the-data").touch()
    Path("data/one/manifest.json").write_text(json.dumps({"tokenizer": "of-the-data"}))
    Path("data/mix/mixture.json").write_text(json.dumps({"sources": [{"label": "a", "set": "../one"}]}))
    for path in ("data/one", "data/mix"):
        assert load("--pretrain-data-path", path).config.tokenizer_path == "of-the-data"
    for name in ("Qwen/Qwen3-0.6B", "gpt2"):  # of the hub
        Path("data/one/manifest.json").write_text(json.dumps({"tokenizer": name}))
        assert load("--pretrain-data-path", "data/one").config.tokenizer_path == name
    for name in ("gone/bpe.model", "gone/tokenizers/chat"):  # of files that were moved
        Path("data/one/manifest.json").write_text(json.dumps({"tokenizer": name}))
        assert load("--check", "--world-size", 2, "--pretrain-data-path", "data/one").config.tokenizer_path is None
    trained = checkpoint_without_weights(Path("runs/trained"), 2)
    (trained / "tokenizer.json").write_text("{}")
    start = ["--training-stage", "sft", "--sft-data-path", "raw", "--pretrain-checkpoint"]
    assert load(*start, "trained").config.tokenizer_path == str(trained)
    assert load(*start, "owner/model@main").config.tokenizer_path == "owner/model"
    assert load(*start, "trained", "--tokenizer-path", "given").config.tokenizer_path == "given"


EVERY = ("validate_every", "sample_every", "save_every", "log_every")


def test_a_run_has_enough_validations_samples_saves_and_lines():
    """Each is also due at the end."""
    for steps in (*range(12, 100), 299, 300, 301):
        chosen = settings_of_length(steps, EVERY)
        validations, samples, saves, lines = (-(-steps // chosen[name]) for name in EVERY)
        assert 6 <= validations <= 15 and 2 <= samples == saves <= 3 and 6 <= lines <= 31, steps
        assert steps < 200 or (validations, samples) == (15, 3)


@pytest.mark.parametrize("trained, flags, length", [
    (256, SFT, 256), (256, DPO, 256), (2048, SFT, 1024), (256, [*SFT, "--max-seq-len", 512], 512), (256, [*SFT, "--depth", 16], 256),
    (2048, [*SFT, "--depth", 16], 2048), (256, [*SFT, "--run-name", "first"], 1024)])
@pytest.mark.parametrize("is_checkpoint", [True, False])
def test_rows_are_not_longer_than_those_that_the_start_was_trained_on(is_checkpoint, trained, flags, length):
    save_state(3, TRAINING_STAGE="sft", SFT_DATA_PATH="set", PRETRAIN_CHECKPOINT="base")  # of another run, which keeps its rows
    shape = make_plan(["--depth", "16"], {}, complete=False).config.model_dump(include={*MODEL_SETTINGS})
    for start in ("base", "chat"):
        if is_checkpoint:
            Path(start, "config.json").unlink()
            Path(start).rmdir()
            checkpoint_without_weights(Path("runs", start), 2, MAX_SEQ_LEN=trained, **{name.upper(): value for name, value in shape.items()})
        else:
            model_without_weights(Path(start), trained, **shape)
    loaded = load(*flags)
    assert loaded.config.max_seq_len == length and any("MAX_SEQ_LEN=256" in note for note in loaded.notes) == (length == 256)


DATA = {"PRETRAIN_DATA_PATH": "shards", "TOKENIZER_PATH": "tokenizer.model"}
DEPTHS = range(1, 65)
USUAL_WORLDS = (1, 2, 3, 4, 6, 8, 12, 16)


def sized(depth: int, *flags) -> Config:
    return make_plan(["--depth", str(depth), *flags], DATA).config


@pytest.mark.parametrize("world", USUAL_WORLDS)
def test_every_depth_is_valid_on_all_usual_numbers_of_ranks_which_read_the_same_rows(world):
    for depth in DEPTHS:
        alone, config = sized(depth), sized(depth, "--check", "--world-size", str(world))
        assert config.accumulation_steps * config.micro_batch_size * world == config.rows_per_step
        safe = {"micro_batch_size": alone.micro_batch_size, "world_size": 1}
        assert config.model_copy(update=safe) == alone


def test_the_shape_has_the_proportions_of_llama_3():
    for depth in DEPTHS:
        config = sized(depth)
        assert (config.n_layers, config.dim, config.head_dim) == (depth, 64 * depth, 64)
        assert config.n_heads % config.n_kv_heads == 0 and config.n_heads <= 4 * config.n_kv_heads
        assert config.hidden_dim % 64 == 0 and 0 <= config.hidden_dim - 8 / 3 * config.dim < 64
    assert [sized(depth).n_kv_heads for depth in (1, 2, 4, 6, 7, 12, 16, 32)] == [1, 1, 1, 2, 7, 3, 4, 8]


def test_what_is_set_anywhere_else_wins_and_the_rest_fits_it():
    Path(".env").write_text("DEPTH=4\nMAX_SEQ_LEN=100\nMULTIPLE_OF=32\n")
    Path("run.json").write_text('{"max_steps": 500}')
    loaded = make_plan(["--config", "run.json", "--learning-rate", "0.5"], DATA | {"INIT_STD": "0.1"})
    config = loaded.config
    assert (config.dim, config.max_seq_len, config.init_std, config.learning_rate) == (256, 100, 0.1, 0.5)
    assert (config.max_steps, config.warmup_steps, config.ffn_dim) == (500, 50, 704)
    assert config.total_batch_size % 4800 == 0
    assert loaded.sources["dim"] == "DEPTH=4" and loaded.sources["max_seq_len"] == ".env:2"
    assert loaded.notes[0] == (
        "DEPTH=4 sets N_LAYERS=4, DIM=256, N_HEADS=4, FFN_DIM=704, N_KV_HEADS=1, TOTAL_BATCH_SIZE=14400, MICRO_BATCH_SIZE=144, "
        "WARMUP_STEPS=50")
    assert sized(4, "--dim", "512").n_heads == 8
    reference = make_plan(["--preset", "1.3b"], DATA).config
    assert {name: getattr(sized(4, "--preset", "1.3b"), name) for name in ("dim", "hidden_dim", "learning_rate")} == {
        name: getattr(reference, name) for name in ("dim", "hidden_dim", "learning_rate")}


def of_reproducible(world: int, **settings) -> dict:
    config = Config(reproducible=True, world_size=world, **settings)
    return settings_of_data(config, 5000, {"total_batch_size", "micro_batch_size", "max_steps", "warmup_steps"})


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_reproducible_run_has_the_same_batch_on_any_number_of_ranks(world):
    flags = "--reproducible=true", "--check", f"--world-size={world}"
    for depth in DEPTHS:
        assert sized(depth, *flags).micro_batch_size == sized(depth, *flags[:1]).micro_batch_size
    config = load(*PRETRAIN, "--total-batch-size=16384", "--max-seq-len=1024", "--micro-batch-size=0", *flags).config  # 16 rows
    assert (config.micro_batch_size, config.reproducible_micro_batches) == (4, 4)
    assert of_reproducible(world, training_stage="sft", epochs=3.0) == of_reproducible(1, training_stage="sft", epochs=3.0)


@pytest.mark.parametrize("flags, words", [
    (["--world-size=3", "--sharding=full"], "MICRO_BATCH_SIZE * MAX_SEQ_LEN * WORLD_SIZE = 1 * 1024 * 3"),
    (["--world-size=32"], "16 micro-batches, too few for WORLD_SIZE=32; use at most 16 ranks"),
    (["--gradient-dtype=bf16"], "GRADIENT_DTYPE=bf16"), (["--precision=fp16"], "PRECISION=fp16"),
    (["--sharding=full", "--cpu-offload=true"], "CPU_OFFLOAD=true")])
def test_what_reproducible_does_not_cover_is_refused(flags, words):
    batch = [*PRETRAIN, "--check", "--reproducible=true", "--total-batch-size=16384", "--max-seq-len=1024", "--micro-batch-size=1"]
    assert load(*batch, "--world-size=3").config.accumulation_steps == 6  # 16 on 3 ranks
    with pytest.raises(SettingsError, match=re.escape(words)) as caught:
        load(*batch, *flags)
    assert len(str(caught.value).splitlines()) == 1
