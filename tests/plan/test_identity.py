"""The hash of a model's weights: of their names, types, shapes and bytes, and of nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from plan.identity import weights_sha256

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
WEIGHTS = {EMBEDDING: np.arange(12, dtype=np.float32).reshape(4, 3), NORM: np.ones(3, np.float32),
           **{f"model.layers.{layer}.mlp.up_proj.weight": np.full((2, 3), layer, np.float32) for layer in (0, 1, 2, 10)}}


def sha256(folder: Path, tensors: dict, layers=None, files: int = 1) -> str:
    folder.mkdir()
    parts = [dict([*tensors.items()][place::files]) for place in range(files)]
    names = ["model.safetensors"] if files == 1 else [f"model-0000{place + 1}-of-0000{files}.safetensors" for place in range(files)]
    for name, part in zip(names, parts):
        save_file({each: np.ascontiguousarray(tensor) for each, tensor in part.items()}, folder / name)
    if files > 1:
        place_of = {each: name for name, part in zip(names, parts) for each in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place_of}))
    return weights_sha256(folder, layers)


def test_a_model_that_is_cut_is_the_model_of_its_first_layers(tmp_path):
    for layers, kept in ((1, "0"), (2, "01"), (3, "012"), (11, ["0", "1", "2", "10"])):
        cut = {name: tensor for name, tensor in WEIGHTS.items() if ".layers." not in name or name.split(".")[2] in kept}
        assert sha256(tmp_path / f"whole-{layers}", WEIGHTS, layers) == sha256(tmp_path / f"cut-{layers}", cut), layers


def test_neither_files_nor_a_copy_of_a_tied_head_nor_old_buffers_count(tmp_path):
    same = [sha256(tmp_path / "one", WEIGHTS), sha256(tmp_path / "three", WEIGHTS, files=3), sha256(tmp_path / "reversed", dict(reversed(WEIGHTS.items()))),
            sha256(tmp_path / "tied", {**WEIGHTS, HEAD: WEIGHTS[EMBEDDING]}), sha256(tmp_path / "old", {**WEIGHTS, "model.rotary_emb.inv_freq": np.ones(2)})]
    assert len({*same}) == 1


@pytest.mark.parametrize("change", [
    {HEAD: WEIGHTS[EMBEDDING] + 1}, {EMBEDDING: WEIGHTS[EMBEDDING].reshape(3, 4)}, {EMBEDDING: WEIGHTS[EMBEDDING].view(np.int32)},
    {NORM: np.array([1, 1, np.nextafter(1, 2, dtype=np.float32)], np.float32)}, {"model.norm2.weight": WEIGHTS[NORM]},
    {"model.layers.0.mlp.up_proj.weight": WEIGHTS["model.layers.1.mlp.up_proj.weight"], "model.layers.1.mlp.up_proj.weight": WEIGHTS["model.layers.0.mlp.up_proj.weight"]}],
    ids=["head", "shape", "type", "last bit", "name", "exchanged"])
def test_every_name_type_shape_and_number_counts(change, tmp_path):
    assert sha256(tmp_path / "one", WEIGHTS) != sha256(tmp_path / "other", WEIGHTS | change)
