"""--check scaling: the bytes that it predicts are those that torch exchanges."""

import re
from collections import Counter

import pytest
import torch
from commands import python
from factories import TINY, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import train
from config import Config
from dataloaders import Batch
from learn.objectives import NextToken
from model_utils import build_model, gradient_sync, wrap_model
from observe.forecast import Hardware, collectives
from parallel import fsdp
from parallel.ranks import joined_ranks

KINDS = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
RANKS, VOCABULARY, MICRO_BATCHES = 4, 512, 2


class Counted(TorchDispatchMode):
    """Counts the bytes of the whole tensors that go through torch's collectives, by their kind."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        kind = KINDS.get(function._schema.name.removeprefix("c10d::"))
        if kind:
            tensors = arguments[0] if kind == "all_reduce" else arguments[kind == "reduce_scatter":][:1]
            self.bytes[kind] += sum(tensor.nbytes for tensor in tensors)
        return function(*arguments, **(options or {}))


def compare(mode: str, changes: dict) -> None:
    settings = {**TINY, "SHARDING": mode, "WORLD_SIZE": RANKS, **({"SHARD_DEGREE": 2} if mode == "hybrid" else {}), **changes}
    config = Config(**{name.lower(): value for name, value in settings.items()})
    compute_dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    with joined_ranks("cpu", 60) as ranks:
        model = build_model(config, VOCABULARY, ranks, compute_dtype)
        trained = wrap_model(model, ranks, config.gradient_dtype)
        tokens_BT = torch.randint(0, VOCABULARY, (2, 32))
        with Counted() as found:
            for number in range(MICRO_BATCHES):
                with gradient_sync(trained, number == MICRO_BATCHES - 1):
                    NextToken().loss_sum(trained, Batch(tokens_BT, tokens_BT)).total.backward()
            if fsdp.is_sharded(model):
                fsdp.average_vectors(model, ranks)
        expected = Counter()
        for each in collectives(mode, config, VOCABULARY, RANKS, 2, MICRO_BATCHES):
            expected[each.kind] += each.calls * each.bytes
        assert found.bytes == expected, (found.bytes, expected)
        print("equal")


@pytest.mark.parametrize(("mode", "changes"), [("none", {}), ("full", {"PRECISION": "bf16"}), ("hybrid", {}),
                                               ("hybrid", {"PRECISION": "bf16", "TIE_EMBEDDINGS": "false"})])
def test_the_predicted_bytes_are_those_of_a_real_step(mode, changes, tmp_path):
    env = {"LOCAL_WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    assert run_ranks(compare, mode, changes, world_size=RANKS, folder=tmp_path, env=env).count("equal") == RANKS


def test_a_ring_and_a_tree_take_the_time_of_the_formula():
    hardware = Hardware(per_machine=8, nvlink=400e9, network=40e9, flops=1)
    config = Config(**{"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336, "tie_embeddings": False})
    block = (8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096) // 32  # Llama 3 8B, without embedding, head and norms
    one, = (each for each in collectives("full", config, 128_256, 16, 8) if each.bytes == block * 2)
    # 64 blocks gathered, over 16 GPUs of 2 machines: 8 network cards, 14 near hops and a far one.
    assert hardware.seconds(one) == pytest.approx(64 * (block * 2 * 15 / 16 / 320e9 + 14 * 3.4e-6 + 14e-6 + 8.4e-6))


def test_the_option_its_alias_and_run_print_the_same_table():
    flags = ["--preset=llama3.2-1b", "--network", "25", "--micro-batches", "1", "4"]
    tables = [python(script, *check, *flags).stdout
              for script, check in (("train.py", ["--check", "scaling"]), ("scripts/plan_scaling.py", []),
                                    ("scripts/run.py", ["--check", "scaling"]))]
    assert tables[0] == tables[1] == tables[2] and tables[0].count("1,236 million weights") == 2
    cells, = re.findall(r"^\| 1,024 \| (.*) \|$", tables[0].partition("hybrid is")[0], re.MULTILINE)
    assert [float(cell) for cell in cells.split(" | ")[::3]] == pytest.approx([9.9, 9.4, 9.4])  # docs/scaling.md


@pytest.mark.parametrize("flags, words", [(["--network=0"], "above 0"), (["--dim=100"], "DIM=100"), (["--chekc"], "--check"),
                                          (["--vocab-size=x"], "--vocab-size")])
def test_mistakes_in_a_forecast_end_with_2(flags, words, capsys):
    with pytest.raises(SystemExit) as ended:
        train.main(["--check=scaling", *flags])
    assert ended.value.code == 2 and words in capsys.readouterr().err
