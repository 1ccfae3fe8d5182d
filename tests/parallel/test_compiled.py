"""With a GPU's settings, two compiled ranks compile nothing after their first steps, whatever else a run does."""

import re

import pytest
import torch
from factories import TinyRun, prepare_stages

import train

pytestmark = [pytest.mark.slow, pytest.mark.compiler, pytest.mark.filterwarnings("default")]
KEPT = {"compile": {}, "selective": {"ACTIVATION_CHECKPOINTING": "selective", "ACTIVATION_MEMORY_BUDGET": 0.9},
        "block": {"ACTIVATION_CHECKPOINTING": "block"}}
LAYOUTS = {"ddp": {}, "fsdp": {"SHARDING": "full"}}
STEPS, WARM = 6, 3  # those that may compile; a validation and samples come before the last of them
# Three validation rows for two ranks of two rows each: the last micro-batch is smaller. Two micro-batches a step.
MEASURED = {"COMPILE": "true", "PRECISION": "bf16", "MAX_STEPS": STEPS, "SAVE_EVERY": 0, "LOG_EVERY": 1, "VALIDATE_EVERY": 2, "SAMPLE_EVERY": 2,
            "VALIDATION_ROWS": 3}


def count_graphs() -> None:
    """In a rank: print before each step how many graphs were compiled, and why a function was compiled again."""
    from torch._dynamo.utils import counters

    rate = train.learning_rate

    def learning_rate(updates: int, config) -> float:
        print(f"graphs before step {updates + 1}: {counters['stats']['unique_graphs']}", flush=True)
        return rate(updates, config)

    torch._logging.set_logs(recompiles=True)
    train.learning_rate = learning_rate


def graphs_of(run: TinyRun) -> list[list[int]]:
    """The graphs that each rank had compiled before each step."""
    job = run.start(2, count_graphs)
    assert job.wait(900) == [0, 0], job.text()
    found = [[int(count) for count in re.findall(r"graphs before step \d+: (\d+)", path.read_text())] for path in job.outputs]
    assert [len(each) for each in found] == [STEPS, STEPS], job.text()
    for each in found:
        assert each[WARM:] == each[WARM:WARM + 1] * (STEPS - WARM), f"{found}\n{job.text()}"
    assert max(map(max, found)) <= 6, "a block, the norm and the head, with and without gradients, and other numbers of targets"
    return found


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_compile_nothing_after_training_evaluation_samples_and_a_smaller_micro_batch(layout, kept, tiny_run):
    run = tiny_run(**MEASURED, **KEPT[kept], **LAYOUTS[layout])
    found = graphs_of(run)
    print(f"\nmeasured: graphs, {layout} {kept} = {found}")
    assert len(run.lines("samples")) >= 3 and len(run.column("val_loss")) >= 3


def test_steps_of_grpo_compile_nothing_for_the_lengths_of_their_answers(prepared, tmp_path_factory, tmp_path):
    """With DDP: GRPO refuses SHARDING."""
    stages = prepare_stages(prepared, tmp_path_factory.mktemp("stages"))
    run = stages.run("grpo", tmp_path, **MEASURED, **KEPT["selective"], MICRO_BATCH_SIZE=2)
    found = graphs_of(run)
    print(f"\nmeasured: graphs, grpo = {found}")
    assert len({line["tokens"] for line in run.lines("rollouts")}) > 2, "answers of different lengths"
