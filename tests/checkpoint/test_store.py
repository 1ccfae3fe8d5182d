"""A good checkpoint survives every failure, and a bad one is never loaded; tensors are read by rows and one at a time."""

import errno
import json
import os
import shutil
import signal
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import faults
import pytest
import torch
from factories import flip_bit, rehash
from safetensors.torch import save_file

from checkpoint import huggingface, model_json, store
from checkpoint import tensors as tensor_files
from checkpoint.manifest import block_rows, fault_of, rows_of_part
from checkpoint.tensors import (
    LazyTensor,
    TensorFile,
    lazy,
    open_tensors,
    read_all,
    read_optimizer,
    write_files,
    write_tensors,
)
from common.errors import CheckpointError
from config import ModelConfig, OptimConfig
from learn.optim import Optimizer
from model import Transformer
from model_utils import load_weights
from run import folder as run_folder
from run.saving import restore_padding, saved_rows

fork_warning = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


STATE = {"identity": {}, "world_size": 1, "settings": {"TRAINING_STAGE": "pretrain"}}


def write_model(folder: Path) -> None:
    save_file({"weight": torch.arange(64.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')


def save(folder: Path, step: int, val_loss=None, write=write_model, optimizer=None, **options) -> Path:
    """A checkpoint as a run publishes it, whose optimizer's file is hashed while it is written."""
    if optimizer is None:
        optimizer = {"weight.exp_avg": torch.full((64,), float(step)), "weight.step": torch.tensor(float(step))}

    def write_all(place: Path) -> dict[str, dict]:
        write(place)
        (place / store.STATE).write_text(json.dumps({**STATE, "progress": {"step": step}, "val_loss": val_loss}))
        return write_files(place, {store.OPTIMIZER: TensorFile(optimizer)})

    measured = val_loss if val_loss == val_loss else None
    facts = {"step": step, "world_size": 1, "val_loss": measured}
    store.publish(folder / f"step-{step:08d}", write_all, facts, **options)
    return folder / f"step-{step:08d}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["MANIFEST.json", "config.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json"])
@pytest.mark.parametrize("damage", ["truncate", "extend", "empty", "delete", "flip"])
def test_damage_of_any_file_is_found_and_the_previous_loads(tmp_path, name, damage):
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    path, content = bad / name, (bad / name).read_bytes()
    if damage == "delete":
        path.unlink()
    elif damage == "flip":
        flip_bit(path)
    else:
        path.write_bytes({"truncate": content[:-1], "extend": content + b"\n", "empty": b""}[damage])
    with pytest.raises(CheckpointError, match=name):
        store.verify(bad)
    folder, messages = store.newest_verified(tmp_path)
    assert folder == good
    assert len(messages) == 1 and name in messages[0] and bad.name in messages[0]


@pytest.mark.parametrize("rows", [0, 1, 5, 64, 100, 1000])
@pytest.mark.parametrize("multiple", [1, 6])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100])
def test_parts_divide_the_rows_between_blocks_that_do_not_depend_on_them(rows, multiple, parts):
    spans = [rows_of_part(rows, multiple, part, parts) for part in range(parts)]
    assert [row for start, stop in spans for row in range(start, stop)] == [*range(rows)]
    block = block_rows(rows, multiple)
    assert block % multiple == 0 and all(edge % block == 0 or edge == rows for span in spans for edge in span)
    assert all(stop - start < -(-rows // parts) + block for start, stop in spans), "a share and less than a block"


@pytest.mark.parametrize("parts", [1, 3])
def test_several_writers_and_readers_agree_with_one_and_every_flipped_byte_is_found(tmp_path, parts, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: parts)
    tensors = {"matrix": torch.rand(48, 3), "heads": torch.rand(24, 2).bfloat16(), "vector": torch.rand(5), "scalar": torch.tensor(2.5),
               "empty": torch.zeros(0, 4), "thin": torch.zeros(4, 0)}
    file, path = TensorFile(tensors, {"format": "pt"}, 4), tmp_path / "several"
    expected = write_files(tmp_path, {"one": file})["one"]
    file.create(path)
    written = [[file.write_rows(path, *item, part, parts) for item in file.tensors.items()] for part in reversed(range(parts))]
    assert file.entry(written[::-1]) == expected and path.read_bytes() == (tmp_path / "one").read_bytes()
    expected["size"] = file.nbytes

    assert fault_of(tmp_path, "several", expected) is None
    for position in range(parts // 2, file.nbytes, 2):  # every second byte, and with the other number of parts the others
        flip_bit(path, position)
        assert str(path) in fault_of(tmp_path, "several", expected), position
        flip_bit(path, position)


def test_all_bad_is_refused_and_never_a_fresh_start(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of 2 checkpoints.*step-00000002/config.json is missing"):
        store.newest_verified(tmp_path)


def test_unlisted_files_are_ignored_but_none_outside_the_folder_is_listed(tmp_path):
    folder = save(tmp_path, 1)
    (folder / "notes.txt").write_text("mine")
    store.verify(folder)
    files = (manifest := store.read_manifest(folder))["files"]
    shutil.copyfile(folder / "config.json", tmp_path / "elsewhere")
    for name in ("../elsewhere", str(tmp_path / "elsewhere"), "link"):
        (folder / "link").unlink(missing_ok=True)
        (folder / "link").symlink_to(tmp_path / "elsewhere")
        rehash(folder, manifest=manifest | {"files": files | {name: files["config.json"]}})
        with pytest.raises(CheckpointError, match="outside its folder.*put a copy of it there"):
            store.verify(folder)


@pytest.mark.parametrize("read, name", [(store.read_state, store.STATE),
                                        (read_optimizer, store.OPTIMIZER)])
def test_a_checkpoint_pruned_during_loading_is_an_error(tmp_path, read, name):
    folder = save(tmp_path, 1)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is gone: "):
        read(folder)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=f"{name} is gone: "):
        read(folder)
    for load in (store.verify, huggingface.load_model_weights):
        with pytest.raises(CheckpointError, match="step-00000001 is gone: "):
            load(folder)


def test_a_pipe_or_device_in_a_checkpoint_is_refused_without_waiting(tmp_path, no_hang):
    folder = save(tmp_path, 1)
    files = (manifest := store.read_manifest(folder))["files"]
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    for name in ("pipe", "folder"):
        rehash(folder, manifest=manifest | {"files": files | {name: {"size": 0, "sha256": "0" * 64}}})
        with pytest.raises(CheckpointError, match=f"{name} cannot be read: .*is not a plain file"):
            store.verify(folder)
    (folder / "zero").symlink_to("/dev/zero")
    rehash(folder, manifest=manifest | {"files": files | {"zero": {"size": 0, "sha256": "0" * 64}}})
    with pytest.raises(CheckpointError, match="outside its folder: 'zero'"):
        store.verify(folder)
    for name, read in ((store.MANIFEST, store.verify), (store.STATE, store.read_state),
                       (store.OPTIMIZER, read_optimizer)):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(CheckpointError, match=f"{name} cannot be read: .*is not a plain file"):
            read(folder)


def in_child(work) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_and_prune(folder: Path) -> None:
    save(folder, 1, val_loss=0.7)  # which is there already, and alone
    save(folder, 2, val_loss=0.5)
    store.prune(folder, keep_last=1, keep_best=0)


@fork_warning
def test_a_death_at_any_call_leaves_a_verified_checkpoint(tmp_path):
    template = tmp_path / "template"
    save(template, 1)
    deaths = 0
    while True:
        folder = tmp_path / str(deaths)
        shutil.copytree(template, folder)

        def work(folder=folder, deadly_call=deaths + 1):
            calls = faults.die_at(deadly_call)
            save_and_prune(folder)
            (tmp_path / "calls.json").write_text(json.dumps(calls))

        code = in_child(work)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        deaths += 1
        chosen, messages = store.newest_verified(folder)
        assert chosen is not None and not messages, "nothing half-written ever carries a checkpoint's name"
        store.delete_leftovers(folder)
        after_sweep, messages = store.newest_verified(folder)
        assert not messages
        assert store.read_manifest(after_sweep)["written"] == max(
            store.read_manifest(path)["written"] for path in folder.iterdir())
        assert all(name.startswith("step-") for name in names(folder)), "the sweep leaves checkpoints only"
        # The next save and prune work on what is left.
        save_and_prune(folder)
        assert names(folder) == ["step-00000002"]
        assert store.verify(folder / "step-00000002")["val_loss"] == 0.5
    seen = set(json.loads((tmp_path / "calls.json").read_text()))
    assert deaths >= 20
    assert seen >= {"open", "write", "os.fsync", "os.rename", "os.unlink"}


@pytest.mark.parametrize("metadata", [None, {"of": "\u201cus\u201d"}])
def test_files_of_tensors_have_the_bytes_that_safetensors_gives_them(tmp_path, monkeypatch, metadata):
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 40)
    tensors = {f"{dtype} \u00e4\"{size}": (torch.rand(size) * 9).to(dtype)
               for dtype in tensor_files.DTYPES for size in (0, 3, 25)}
    tensors |= {"scalar": torch.tensor(2.5), "matrix": torch.arange(12.0).view(3, 4), "empty": torch.zeros(2, 0)}
    save_file(tensors, tmp_path / "theirs", metadata)
    write_tensors(tmp_path / "ours", tensors | {"matrix": torch.arange(12.0).view(3, 4).T.contiguous().T}, metadata)
    store.sync(tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["write_files", "sha256", "sync", "sync_folder"])
def test_a_full_disk_is_an_error_and_leaves_no_files(tmp_path, monkeypatch, where):
    good = save(tmp_path, 1)

    def write(folder):
        write_model(folder)
        if where == "write_files":
            no_space()

    if hasattr(store, where):
        monkeypatch.setattr(store, where, no_space)
    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be written: No space left on device; .*[\d,]+ bytes free; free some space, or set OUTPUT_DIR"):
        save(tmp_path, 2, write=write)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    assert store.newest_verified(tmp_path) == (good, [])
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("where", ["write_files", "sha256", "sync", "sync_folder", "os.rename"])
@pytest.mark.parametrize("failures", [1, len(store.RETRY_SECONDS), len(store.RETRY_SECONDS) + 1])
def test_a_write_to_an_unavailable_network_disk_is_retried_and_reported(tmp_path, monkeypatch, where, failures):
    good, left, messages, waited = save(tmp_path, 1), [failures], [], []
    place = SimpleNamespace(write=write_model)
    module, name = {"os.rename": (os, "rename"), "write_files": (place, "write")}.get(where, (store, where))
    real = getattr(module, name)

    def failing(*args, **kwargs):
        if left[0] and (name != "rename" or "tmp-" in str(args[0])):
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, failing)
    monkeypatch.setattr(store.time, "sleep", waited.append)
    is_lost = failures > len(store.RETRY_SECONDS)
    with pytest.raises(CheckpointError, match="step-00000002 cannot be written") if is_lost else nullcontext():
        save(tmp_path, 2, write=lambda folder: place.write(folder), warn=messages.append)
    assert names(tmp_path) == ["step-00000001"] + ["step-00000002"] * (not is_lost)
    assert store.newest_verified(tmp_path) == (good if is_lost else tmp_path / "step-00000002", [])
    waits = store.RETRY_SECONDS[:failures]
    assert sum(waited) == pytest.approx(sum(waits)) and max(waited) <= 1, "it beats meanwhile"
    assert len(messages) == len(waits) and all("step-00000002 cannot be written" in text and "retrying in" in text for text in messages)


def test_retention_keeps_last_best_and_protected(tmp_path):
    for step, val_loss in ((1, 5.0), (2, 1.0), (3, None), (4, 2.0), (5, float("nan")), (6, 9.0), (7, 8.0)):
        save(tmp_path, step, val_loss)
    removed = store.prune(tmp_path, keep_last=2, keep_best=2, protected=[tmp_path / "step-00000003"])
    assert names(tmp_path) == [f"step-0000000{step}" for step in (2, 3, 4, 6, 7)]
    assert sorted(path.name for path in removed) == ["step-00000001", "step-00000005"]
    store.prune(tmp_path, keep_last=1, keep_best=1, keep_every=3)
    assert names(tmp_path) == [f"step-0000000{step}" for step in (2, 3, 6, 7)]


def test_a_checkpoint_that_another_run_needs_is_kept_also_if_both_are_moved_together(tmp_path):
    for run in ("base", "tuned"):
        (tmp_path / "here" / run / "checkpoints").mkdir(parents=True)
    for step in (1, 2, 3):
        save(tmp_path / "here" / "base" / "checkpoints", step)
    store.note_need(tmp_path / "here" / "base" / "checkpoints" / "step-00000001", tmp_path / "here" / "tuned")
    checkpoints = (tmp_path / "here").rename(tmp_path / "there") / "base" / "checkpoints"
    assert [path.name for path in store.prune(checkpoints, keep_last=1, keep_best=0)] == ["step-00000002"]
    shutil.rmtree(tmp_path / "there" / "tuned")
    assert [path.name for path in store.prune(checkpoints, keep_last=1, keep_best=0)] == ["step-00000001"]


def test_newest_is_the_last_written_not_the_highest_step(tmp_path):
    save(tmp_path, 600)
    later = save(tmp_path, 450)
    assert store.newest_verified(tmp_path) == (later, [])


def test_pruning_a_linked_checkpoint_removes_the_link_and_keeps_its_target(tmp_path):
    folder, elsewhere, messages = tmp_path / "checkpoints", tmp_path / "elsewhere", []
    for step in (1, 2, 3, 4):
        save(folder, step)
    elsewhere.mkdir()
    for step in (1, 2):
        target = (folder / f"step-0000000{step}").rename(elsewhere / f"step-0000000{step}")
        (folder / f"step-0000000{step}").symlink_to(target)
    (folder / "trash-of-an-earlier-version").symlink_to(elsewhere)
    store.delete_leftovers(folder, messages.append)
    save(folder, 2, warn=messages.append)
    store.prune(folder, keep_last=1, keep_best=0, warn=messages.append)
    assert names(folder) == ["step-00000002"] and not messages
    for step in (1, 2):
        store.verify(elsewhere / f"step-0000000{step}")


def test_best_is_the_checkpoint_with_the_lowest_validation_loss(tmp_path):
    """Also behind a run's name, of a damaged one the next, and of none with a loss it says so."""
    run_dir, losses = tmp_path / "runs" / "first", {1: 3.0, 2: 1.5, 3: 2.0, 4: None}
    for step, loss in losses.items():
        save(run_dir / "checkpoints", step, val_loss=loss)
    best = run_dir / "checkpoints" / "step-00000002"
    for name in ("first:best", f"{run_dir}:best"):
        assert store.locate(name, tmp_path / "runs" / "-") == best
    assert store.locate("first", tmp_path / "runs" / "-").name == "step-00000004"
    file = best / next(iter(store.read_manifest(best)["files"]))
    file.write_bytes(b"x" * file.stat().st_size)
    messages = []
    assert store.locate("first:best", tmp_path / "runs" / "-", messages.append, store.verify).name == "step-00000003" and len(messages) == 1
    save(tmp_path / "runs" / "reward" / "checkpoints", 1, val_loss=None)
    with pytest.raises(CheckpointError, match="has a validation loss, so none is the best; leave out :best"):
        store.locate("reward:best", tmp_path / "runs" / "-")


def test_locate_takes_a_model_folder_but_no_checkpoint_without_its_manifest(tmp_path):
    write_model(tmp_path)
    assert store.locate(str(tmp_path), tmp_path / "run") == tmp_path
    folder = save(tmp_path / "checkpoints", 1)
    (folder / store.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="MANIFEST.json"):
        store.locate(str(folder), tmp_path / "run")


@fork_warning
def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    def holder():
        with run_folder.lock_run(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(holder) == -signal.SIGKILL
    assert (tmp_path / run_folder.LOCK).read_text().startswith("process ")
    with run_folder.lock_run(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / run_folder.LOCK).read_text()


def test_a_folder_that_is_a_link_and_links_within_it_or_within_the_cache_of_the_hub_are_followed(tmp_path):
    folder = save(tmp_path / "models--us--ours" / "snapshots", 1)
    (tmp_path / "link").symlink_to(folder)
    (folder / "config.json").rename(folder / "moved.json")
    (folder / "config.json").symlink_to("moved.json")
    (folder.parents[1] / "blobs").mkdir()
    (folder / "model.safetensors").rename(folder.parents[1] / "blobs" / "5f3a")
    (folder / "model.safetensors").symlink_to("../../blobs/5f3a")
    assert store.verify(folder) == store.verify(tmp_path / "link")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG])
def test_a_permanent_disk_error_is_reported_without_a_retry(tmp_path, monkeypatch, number):
    def refuse(folder):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store.time, "sleep", lambda seconds: pytest.fail("it waits for what does not pass"))
    for folder in (tmp_path, tmp_path / "Errno 5, code: 116"):  # a name is not an error's number
        folder.mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=os.strerror(number)):
            save(folder, 1, write=refuse)


def test_rows_of_a_file_are_those_of_the_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 40)
    tensors = {"matrix": torch.randn(7, 5), "vector": torch.randn(9).bfloat16(), "scalar": torch.tensor(2.5),
               "wide": torch.randn(3, 50), "empty": torch.zeros(0, 4), "thin": torch.zeros(4, 0)}
    save_file(tensors, tmp_path / "file")
    opened = open_tensors(tmp_path / "file")
    assert opened.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for each in (opened[name], lazy(tensor)):
            assert (each.shape, each.dtype, each.nbytes) == (tensor.shape, tensor.dtype, tensor.nbytes)
            assert torch.equal(each.full(), tensor)
            spans = [(i, j) for i in range(each.rows + 1) for j in range(i, each.rows + 1)] if each.shape else []
            assert all(torch.equal(each.read(i, j), tensor[i:j]) for i, j in spans)
            pieces = [each.read(*span) for span in each.spans()]
            assert torch.equal(torch.cat([tensor[:0].flatten() if tensor.ndim else tensor[None][:0],
                                          *(piece.flatten() for piece in pieces)]), tensor.flatten())
            assert all(piece.nbytes <= 40 or len(piece) == 1 for piece in pieces)
    assert opened["matrix"].equals(lazy(tensors["matrix"])) and not opened["matrix"].equals(lazy(torch.zeros(7, 5)))


def one_at_a_time(tensors: dict[str, torch.Tensor]) -> dict[str, LazyTensor]:
    read_before: list[weakref.ref] = []

    def guarded(tensor: torch.Tensor) -> LazyTensor:
        def read(start: int, stop: int) -> torch.Tensor:
            assert not any(reference() is not None for reference in read_before), "two are in memory"
            rows = lazy(tensor).read(start, stop).clone()
            read_before.append(weakref.ref(rows.untyped_storage()))
            return rows

        return LazyTensor(tuple(tensor.shape), tensor.dtype, read)

    return {name: guarded(tensor) for name, tensor in tensors.items()}


def test_a_model_and_its_optimizer_are_read_one_tensor_at_a_time(monkeypatch, tmp_path):
    """With the padding of the vocabulary, which no file has."""
    config = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16)
    trained, loaded = Transformer(config, 100), Transformer(config, 100)
    trained.init_weights(torch.Generator().manual_seed(0))
    optimizer, fresh = Optimizer(trained, OptimConfig()), Optimizer(loaded, OptimConfig())
    trained(torch.arange(20).view(1, 20), torch.arange(20).view(1, 20)).sum().backward()
    optimizer.step(0.01)
    trained.tok_embeddings.weight.data[100:] = 0
    tensors = read_all(huggingface.to_huggingface(trained.state_dict(), config, 100))
    monkeypatch.setattr(huggingface, "load_model_weights", lambda folder: one_at_a_time(tensors))
    model_json.write_json(tmp_path / "config.json", model_json.huggingface_config(config, 100, 64, None, 0, "float32"))
    load_weights(tmp_path, loaded)
    assert all(torch.equal(actual, reference) for actual, reference in zip(loaded.parameters(), trained.parameters()))
    state = {name: lazy(tensor).first_rows(saved_rows(name, tensor, trained)) if tensor.ndim else lazy(tensor)
             for name, tensor in optimizer.state_tensors().items()}
    assert state["tok_embeddings.weight.exp_avg"].shape == (100, 32)
    fresh.load_state_tensors(restore_padding(one_at_a_time(read_all(state)), loaded))
    actual, reference = fresh.state_tensors(), optimizer.state_tensors()
    assert actual.keys() == reference.keys() and all(torch.equal(actual[name], reference[name]) for name in actual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_are_the_mean_of_the_others_which_do_not_change(dtype, monkeypatch):
    whole = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    monkeypatch.setattr("checkpoint.tensors.BLOCK_BYTES", 7 * 6 * dtype.itemsize)  # read in several blocks
    larger = lazy(whole).resized(43)
    rows = larger.read(0, 43)
    assert larger.shape == (43, 6) and rows.dtype == dtype and torch.equal(rows[:40], whole)
    assert torch.equal(rows[40:], whole.double().mean(dim=0).to(dtype).expand(3, 6))
    for span in ((0, 5), (38, 42), (41, 43), (40, 40)):  # as the ranks of a sharded model read it
        assert torch.equal(larger.read(*span), rows[slice(*span)])
    assert torch.equal(lazy(whole).resized(9).full(), whole[:9]) and torch.equal(lazy(whole).resized(40).full(), whole)
    assert torch.equal(larger.padded(128).full()[:43], rows) and not larger.padded(128).full()[43:].any()


def test_a_file_that_is_replaced_or_deleted_is_not_read_on(tmp_path):
    write_tensors(tmp_path / "file", {"a": torch.ones(3)})
    tensor = open_tensors(tmp_path / "file")["a"]
    write_tensors(tmp_path / "other", {"a": torch.zeros(3)})
    (tmp_path / "other").rename(tmp_path / "file")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="file is gone: "):
            tensor.full()
        (tmp_path / "file").unlink(missing_ok=True)
