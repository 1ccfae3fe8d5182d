"""The families of MODEL_TYPE: a run of each is a loop on transformers, and what it writes is read there and here."""

import math

import pytest
import torch
from factories import LORA, UNMEASURED, TinyRun, assert_same_run, in_transformers
from torch.nn import functional as F

from config import Config
from dataloaders import load_steps
from extensions.inference.engine import generate
from extensions.inference.weights import find_model, load_to_generate
from learn.objectives import NextToken
from model_kernels.head import IGNORE_INDEX
from model_utils import build_model
from parallel.ranks import Ranks
from plan.make import make_plan
from run.facts import read_inputs

transformers = pytest.importorskip("transformers", reason="the oracle of these tests: pip install -r requirements-dev.txt")

FAMILIES = {"llama": {"HEAD_WIDTH": 12}, "qwen2": {"ROPE_SCALING_FACTOR": 4, "ROPE_SCALING_TYPE": "yarn", "ROPE_ORIGINAL_MAX_LEN": 16},
            "qwen3": {"HEAD_WIDTH": 12, "SLIDING_WINDOW": 6, "SLIDING_EVERY": 2}, "mistral": {"SLIDING_WINDOW": 6, "TIE_EMBEDDINGS": "false"},
            "smollm3": {"NO_ROPE_EVERY": 2}}
STEPS = 10


def losses_of_transformers(config: Config, rates: dict[int, float]) -> tuple[list[float], torch.nn.Module]:
    """The losses of a plain loop, which reads each document alone, and its model."""
    inputs = read_inputs(config, verify=False)
    reference = in_transformers(build_model(config, inputs.tokenizer.vocab_size, Ranks(), torch.float32)).train()
    matrices, vectors = ([p for p in reference.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
                                  betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    losses = []
    with load_steps(inputs.rows, inputs.order(config, Ranks()), Ranks().device, NextToken().count) as steps:
        for step in range(STEPS):
            batches, count = next(steps)
            total = torch.zeros(())
            for row in (row for batch in batches for row in zip(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT)):
                lengths = torch.unique_consecutive(row[2], return_counts=True)[1].tolist()
                for tokens, targets in zip(row[0].split(lengths), row[1].split(lengths)):
                    total += F.cross_entropy(reference(tokens[None]).logits[0], targets, ignore_index=IGNORE_INDEX, reduction="sum")
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), config.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = rates[step + 1]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(total.detach() / count))
    return losses, reference.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_is_a_loop_on_transformers_and_its_folder_is_read_there(family, prepared, tmp_path):
    """Rows of several documents; stopped and resumed; its greedy text, and that of adapters trained on it."""
    settings = {**UNMEASURED, "MAX_STEPS": STEPS, "SAVE_EVERY": 5, "TOTAL_BATCH_SIZE": 64, "ADAM_EPS": 1e-5, "MODEL_TYPE": family, **FAMILIES[family]}
    run = TinyRun(prepared, tmp_path / "whole", **settings)
    parted = TinyRun(prepared, tmp_path / "parted", **settings)
    assert run.train() == parted.train(STOP_STEP=5) == 0 and parted.train() == 0
    assert_same_run(run, parted, STEPS, logs=("ledger",))
    losses, expected = losses_of_transformers(make_plan(run.argv(), {}).config, run.column("learning_rate"))
    assert [*run.column("train_loss").values()] == pytest.approx(losses, rel=2e-5)

    folder = run.checkpoint(STEPS)
    other, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()) and other.config.model_type == family, report
    for name, weight in other.named_parameters():
        assert (weight - expected.get_parameter(name)).abs().max() < 1e-3, name
    # Adapters of a run that does not name the family
    named = {name: run.settings.pop(name) for name in ("MODEL_TYPE", *FAMILIES[family])}
    assert run.train(RUN_NAME="adapted", PRETRAIN_CHECKPOINT=folder, MAX_STEPS=4, LEARNING_RATE=0.02, **LORA) == 0
    adapted = pytest.importorskip("peft").PeftModel.from_pretrained(other, run.folder.parent / "adapted" / "checkpoints" / "step-00000004")
    prompts = [[*range(1, 1 + length)] for length in (3, 17)]
    for model, reference in ((load_to_generate(folder, weights="fp32"), expected), (load_to_generate(find_model(str(tmp_path / "whole" / "adapted")), weights="fp32"), adapted)):
        actual = generate(model[0], prompts, 12)
        for prompt, ids in zip(prompts, actual):
            written = reference.generate(input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                                         max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
                                         suppress_tokens=model[1].generation.get("suppress_tokens"))
            assert written[0, len(prompt):].tolist() == ids
    assert run.train(RUN_NAME="other", PRETRAIN_CHECKPOINT=folder, MAX_STEPS=20, **named | {"MODEL_TYPE": "qwen2" if family != "qwen2" else "qwen3"}) == (2 if "NO_ROPE_EVERY" in named else 5)


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != "qwen3")])
def test_every_stage_trains_a_family(family, stages, tmp_path):
    """The first loss of DPO is ln 2; GRPO writes answers; sharded adapters learn what whole ones do."""
    base = TinyRun(stages.prepared, tmp_path, RUN_NAME="base", MAX_STEPS=1, **UNMEASURED, MODEL_TYPE=family, **FAMILIES[family]).trained()
    start = {**UNMEASURED, "MAX_STEPS": 2, "SAVE_EVERY": 0, "PRETRAIN_CHECKPOINT": base.checkpoint(1), "LORA_DROPOUT": 0.0}
    runs = {mode: stages.run(mode, tmp_path / mode, **start) for mode in ("sft", "dpo-live", "grpo", "lora-sft")}
    assert [run.train() for run in runs.values()] == [0] * 4
    assert runs["dpo-live"].column("train_loss")[1] == pytest.approx(math.log(2), rel=1e-6)
    assert runs["grpo"].lines("rollouts")
    sharded = stages.run("lora-sft", tmp_path / "sharded", **start)
    sharded.ends([0, 0], SHARDING="full")
    assert sharded.column("train_loss") == pytest.approx(runs["lora-sft"].column("train_loss"), rel=1e-5)
    assert sharded.column("grad_norm") == pytest.approx(runs["lora-sft"].column("grad_norm"), rel=1e-4)
