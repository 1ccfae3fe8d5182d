"""The facts that complete a plan, collected on rank 0 before the other ranks get it.

Files are verified here, models of the hub downloaded, rows counted, inputs opened and identities compared.
Only the lock of the run's folder is written.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

import dataloaders
import lora
import model_utils
from checkpoint import huggingface, peft, store
from checkpoint.manifest import MANIFEST
from checkpoint.model_json import hub_model
from common.errors import CheckpointError, DataError, SettingsError
from common.files import read_json, sha256
from common.text import ROOT, show
from config import SAMPLE, START_FROM, Config, mps_rules
from data_pipeline.mixture import is_mixture, read_mixture
from data_pipeline.shards import sets_beside
from data_pipeline.templates import load_chat_format, text_tokenizer
from hellaswag_utils import read_choice_set
from learn import objectives
from parallel import process
from parallel.process import EXIT_PREEMPTED
from parallel.ranks import Interrupted
from plan.identity import Identity, model_identity, weights_sha256
from plan.make import Plan, complete
from plan.resume_rules import check_changes
from plan.starts import Known, Start, base_places, check_model, is_inside
from run.extensions import Extension, find, load_extensions
from run.folder import RunFolder, earlier_runs, make_and_lock
from run.run import Inputs
from tokenizer import SUPPRESSED, load_tokenizer, read_generation

Remake = Callable[[Known], Plan]  # make_plan with what was found out about the start's files


class Opened(NamedTuple):
    """What a rank opens for a run."""

    inputs: Inputs
    extensions: list[Extension]


def decide(plan: Plan, remake: Remake, stack: ExitStack) -> tuple[Plan, RunFolder, Opened]:
    """Return the complete plan, the run's folder, locked until `stack` closes, and the opened inputs."""
    messages: list[str] = []
    extensions = load_extensions(plan.config, messages.append)
    plan, known = find_files(plan, remake)
    device = prepare_device(plan.config)
    provide_sample(plan.config)
    plan = complete(plan, device.type, count_rows(plan))
    folder = stack.enter_context(make_and_lock(plan.config, messages.append))
    if remake(known).start != plan.start:
        raise CheckpointError(f"{folder.path} has been continued by another job meanwhile; start again")
    opened = open_inputs(plan.config, True, extensions)
    plan = with_tokens(with_identities(plan, opened.inputs, folder.path), opened.inputs)
    process.write_marker(process.SETTINGS, json.dumps(plan.of_files()))
    return plan.changed((), messages), folder, opened


def find_files(plan: Plan, remake: Remake) -> tuple[Plan, Known]:
    """Return the plan whose start is downloaded and verified, and what was found out about it."""
    known = Known()
    while True:
        if name := plan.start.download:
            known = replace(known, hub={**known.hub, name: str(hub_model(name))})
        else:
            folder = plan.start.folder
            try:
                if folder and (Path(folder) / MANIFEST).exists():
                    store.verify(Path(folder), plan.start.kind == "continue")
                return plan, known
            except CheckpointError as error:
                known = replace(known, damaged={**known.damaged, folder: str(error)})
        plan = remake(known)


def count_rows(plan: Plan) -> Optional[int]:
    """Return the number of training rows if settings depend on it."""
    config, deferred = plan.config, {*plan.deferred} - {"compile"}
    if not deferred or not config.data_path or not config.tokenizer_path or config.prepare_ahead:
        return None
    tokenizer, path = load_tokenizer(config.tokenizer_path, config.tokenizer_backend), config.data_path
    sets = [source.set for source in read_mixture(Path(path)).sources] if is_mixture(path) else [path]
    return sum(len(dataloaders.open_set(config, each, "train", tokenizer, "never")) for each in sets)


def prepare_device(config: Config) -> torch.device:
    """Return the compute device, after applying DETERMINISTIC to torch's kernels."""
    device = torch.device(model_utils.choose_device(config))
    if device.type == "mps" and (refused := [*mps_rules(config)]):
        raise SettingsError(*refused)
    model_utils.make_deterministic(config, device.type)
    return device


# -------------------------------------------------------------------------------------------- inputs


def lacks_sample(config: Config) -> bool:
    """Return whether the settings name files of the sample, which this machine does not have."""
    named = (config.tokenizer_path, config.hellaswag_path, config.data_path)
    return not os.path.exists(SAMPLE) and any(path and Path(path).is_relative_to(SAMPLE) for path in named)


def provide_sample(config: Config) -> None:
    """Create the sample if the settings name it and it is missing; Interrupted if a signal stops that."""
    if not lacks_sample(config):
        return
    script = ROOT / "scripts" / "make_sample.py"
    code = subprocess.run([sys.executable, str(script), "--folder", SAMPLE]).returncode
    if code in {130, EXIT_PREEMPTED, *(-number for number in process.STOP_SIGNALS)}:
        show(f"Stopped by a signal before the first step; the next start creates {SAMPLE}.")
        raise Interrupted
    if code:
        raise DataError(f"could not create the sample data in {SAMPLE}; see the error above")


def open_inputs(config: Config, verify: bool, extensions: list[Extension]) -> Opened:
    """Open the inputs, as changed by the run's extensions. One rank of each machine verifies them."""
    inputs = read_inputs(config, verify)
    for each in extensions:
        inputs = each.inputs(config, inputs, config.verify_data if verify else "never")
    return Opened(inputs, extensions)


def read_inputs(config: Config, verify: bool) -> Inputs:
    """Open the tokenizer, the data and the evaluation sets."""
    tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer_backend)
    if config.training_stage != "pretrain":
        text_tokenizer(tokenizer)  # finds the end of turn, which saved folders name
    if verify:
        dataloaders.cache_of(config).check()
    mode = config.verify_data if verify else "never"
    train = dataloaders.open_rows(config, "train", tokenizer, mode)
    is_kto = config.preference_objective == "kto"
    if config.training_stage == "dpo" and any(
            is_kto == (source.example_set.labels is None) for source in train.sources):
        content, other = ("pairs", "unpaired answers") if is_kto else ("unpaired answers", "pairs")
        remedy = "dpo, orpo or simpo" if is_kto else "kto"
        raise DataError(f"{config.data_path} has {content}, but PREFERENCE_OBJECTIVE="
                        f"{config.preference_objective} needs {other}; set PREFERENCE_OBJECTIVE={remedy}, or "
                        f"name {other} in DPO_DATA_PATH (prepare pairs makes both)")
    evaluated = open_evaluation_inputs(config, tokenizer, mode)
    rows = evaluated["validation_rows"]
    held_out, own = f", {rows.describe()} held out" if rows else "", config.validation_data_path
    if own and rows and rows.fingerprint == train.fingerprint:
        own += ": the same tokens that the run trains on"
    held_out += (f" ({own})" if rows else f" ({own} is not read: VALIDATE_EVERY=0)") if own else ""
    return Inputs(tokenizer, train, **evaluated,
                  description=f"{train.describe()}{held_out} from {config.data_path}")


def open_evaluation_inputs(config: Config, tokenizer, verify: str) -> dict[str, Any]:
    """Return the fields of `Inputs` for evaluations; `verify` is "auto", "always" or "never"."""
    rows = dataloaders.open_rows(config, "validation", tokenizer, verify) if config.validate_every else None
    choice_sets = config.choice_sets if config.hellaswag_every else ()
    return {"validation_rows": rows,
            "choice_sets": [read_choice_set(choices, tokenizer, config) for choices in choice_sets]}


# ---------------------------------------------------------------------------------------- identities


def identity_of_data(inputs: Inputs) -> dict[str, Any]:
    """Return the identity of the prepared data that a run reads."""
    prepared, held_out = [], inputs.validation_rows
    content = "".join(source.token_set.content for source in inputs.rows.sources)
    for source in inputs.rows.sources:
        prepared.append({})  # token files of other programs have no manifest
        for name in ("journal.json", "manifest.json"):
            with suppress(OSError, ValueError):
                prepared[-1] = read_json(source.token_set.folder / name).get("settings", {})
    return {"tokens": inputs.rows.fingerprint, "held_out": held_out.fingerprint if held_out else "",
            "tokenizer": inputs.tokenizer.sha256, **({"files": content} if content else {}),
            "template": [each.get("chat_format_sha256", "") for each in prepared],
            "system_prompt": [each.get("system_prompt", "") for each in prepared]}


def with_identities(plan: Plan, inputs: Inputs, run_dir: Path) -> Plan:
    """Return the plan with the identities of data, base and teacher, compared with the record."""
    config, start, messages = plan.config, plan.start, list[str]()
    tokenizer, data = inputs.tokenizer, identity_of_data(inputs)
    identities: dict[str, Identity] = {"data": data}
    if start.folder and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        identities["start"] = identity_of_start(Path(start.folder))  # for the other machines
    warnings = check_template(plan, inputs, data) if config.training_stage != "pretrain" else []
    if start.kind == "from":
        base = Path(start.base or start.folder)
        messages += model_utils.check_vocabulary(base, tokenizer, config)
        identities["base"] = model_identity(weights_sha256(base, start.layers), config, tokenizer.sha256)
    elif start.kind == "continue" and (config.lora_enabled or objectives.reference_is_live(config)):
        progress = start.state["progress"]
        home = run_dir if is_inside(Path(start.folder), run_dir) else Path(start.folder).resolve().parents[1]
        base = find_base(config, progress, home, warnings.append)
        start = start._replace(base=str(base), layers=config.n_layers)
        warnings += check_model(start, config)
        identities["base"] = model_identity(progress["base_sha256"], config)
    if config.lora_enabled and (
            objectives.reference_is_live(config) or objectives.reference_is_stored(config)):
        if adapters := adapters_of_start(start, config, run_dir):
            identities["reference_adapters"] = adapters
    if config.distillation_enabled:
        distillation = find("distillation", "DISTILLATION_ENABLED=true")
        identities["teacher"] = distillation.teacher_of(plan, tokenizer)
    plan = replace(plan, start=start, identities=identities)
    if start.kind == "continue":
        identity = inputs.identity(config, plan, start.state["identity"])
        earlier_sets = lambda: " or ".join(sets_beside(config.data_path))
        changes, risks = check_changes(start.state, plan, identity, earlier_sets)
        messages, warnings = messages + changes, warnings + risks
    elif config.resume == "auto" and (earlier := earlier_runs(run_dir)) and start.kind == "new":
        warnings.append(f"{run_dir} only has checkpoints of a run that RESUME=never moved aside, so this run "
                        "starts from the beginning; to resume the earlier one, set "
                        f"RESUME={earlier[-1].parent}")
    return plan.changed(messages, warnings)


def check_template(plan: Plan, inputs: Inputs, data: Identity) -> list[str]:
    """Compare the chat template and SYSTEM_PROMPT of the prepared data with the run's; return warnings."""
    config, now, warnings = plan.config, load_chat_format(inputs.tokenizer).sha256, []
    if other := {*data["template"]} - {"", now}:
        text = (f"{config.data_path} was prepared with another chat template (SHA-256 {min(other)[:12]}) "
                f"than TOKENIZER_PATH={config.tokenizer_path} has ({now[:12]}), which the model is saved "
                "with")
        if plan.start.kind != "continue":
            raise DataError(f"{text}; prepare the data again with this tokenizer, or set TOKENIZER_PATH to "
                            "the one that it was prepared with")
        warnings.append(text)
    if config.system_prompt and {*data["system_prompt"]} != {config.system_prompt}:
        had = " and ".join(repr(each) for each in sorted({*data["system_prompt"]}))
        warnings.append(f"SYSTEM_PROMPT={config.system_prompt!r} has no effect on {config.data_path}, which "
                        f"was prepared with {had}; prepare the data again to use it")
    return warnings


def adapters_of_start(start: Start, config: Config, run_dir: Path) -> Identity:
    """Return folder and hash of the adapters with which a run started, for its reference; {} without any."""
    if start.kind == "from":
        folder = Path(start.folder) if start.has_adapters else None
        return {"folder": str(folder), "sha256": adapters_sha256(folder)} if folder else {}
    if (wanted := start.state["identity"].get("REFERENCE_ADAPTERS")) is None:
        return {}
    names = [start.state["progress"].get("begun_from"), *(getattr(config, each) for each in START_FROM)]
    for name in filter(None, names):
        with suppress(CheckpointError):
            folder = store.locate(name, run_dir, lambda _: None, store.read_manifest)
            for place in (folder, *folder.parent.glob("step-*")):
                if adapters_sha256(place) == wanted:
                    return {"folder": str(place), "sha256": wanted}
    raise CheckpointError(f"the adapters that this run started with, SHA-256 {wanted}, were not found; "
                          f"restore them, or set {config.start_setting} to their folder, by a flag")


def adapters_sha256(folder: Path) -> str:
    with suppress(FileNotFoundError), open(folder / peft.WEIGHTS_FILE, "rb") as file:
        return sha256(file)
    return ""


def identity_of_start(folder: Path) -> dict[str, str]:
    if (folder / MANIFEST).exists():
        return {"manifest": store.read_manifest(folder)["sha256"]}
    return {"weights": weights_sha256(folder)}


def find_base(config: Config, progress: Mapping[str, Any], run_dir: Path, warn: store.Warn) -> Path:
    names = [config.named_checkpoint, *(getattr(config, setting) for setting in config.start_settings)]
    advice = f"set {config.start_setting} to the folder where it is now, by a flag"
    return find_by_hash(names, progress, run_dir, warn, advice, config.n_layers)


def find_by_hash(names: Iterable[Optional[str]], progress: Mapping[str, Any], run_dir: Path, warn: store.Warn,
                 advice: str, layers: Optional[int] = None) -> Path:
    """Return the folder with the hash of a run's base, or of its first `layers`: by these names, by its
    place when the run started, or by that place relative to the run. The error ends with `advice`."""
    remembered, wanted = [*base_places(progress, run_dir)], progress["base_sha256"]
    named, failures = [], []
    for name in dict.fromkeys(filter(None, names)):
        try:  # the hash of the weights verifies them
            folder = store.locate(name, run_dir, warn, store.read_manifest)
        except CheckpointError as error:
            failures.append(str(error))
            continue
        # A run that is named may have trained on. Then the base is beside its newest checkpoint.
        sibling = remembered and folder.parent / remembered[0].name
        named += [sibling, folder] if sibling and sibling.is_dir() else [folder]

    for place in dict.fromkeys(path.resolve() for path in (*named, *remembered)):
        try:
            if not place.is_dir():
                raise CheckpointError(f"{place} does not exist")
            if (found := weights_sha256(place, layers)) == wanted:
                return place
            failures.append(f"{place} is another model, whose weights have SHA-256 {found}")
        except CheckpointError as error:
            failures.append(str(error))
    raise CheckpointError(f"the base of this run, whose weights have SHA-256 {wanted}, was not found: "
                          f"{'; '.join(failures) or 'no place is known'}. Restore it, or {advice}")


# ------------------------------------------------------------------------------------------- tokens


def with_tokens(plan: Plan, inputs: Inputs) -> Plan:
    """Return the plan with the control tokens that are never generated, and the rows that LoRA trains."""
    config, start = plan.config, plan.start
    generation: dict[str, Any] = {}
    if source := start.base if config.lora_enabled else start.folder:
        own = start.folder if start.kind == "continue" or start.has_adapters else source
        generation = read_generation(Path(source)) | read_generation(Path(own))
    if start.folder is None or SUPPRESSED in generation and start.kind != "continue":
        # Untrained control tokens are those that the data lacks. New weights know none; otherwise, the
        # model's files list the candidates.
        tokenizer = inputs.tokenizer
        unseen = {*tokenizer.special_ids.values()} - {*tokenizer.stop_ids, tokenizer.eot_id}
        unseen = {*generation[SUPPRESSED]} if start.folder else unseen
        if unseen and config.training_stage != "grpo":  # whose records are stored among the tokens, as bytes
            unseen -= {*inputs.used_ids()}
        generation |= {SUPPRESSED: sorted(unseen)}
    token_ids, untrained, messages = {}, [], []
    if config.lora_enabled and not start.has_adapters and config.lora_train_tokens != "none":
        token_ids, untrained, learned = token_ids_to_train(config, inputs, Path(start.base), start.layers)
        if learned:
            names = inputs.tokenizer.decode(learned[:5]) + " ..." * (len(learned) > 5)
            messages.append(f"LORA_TRAIN_TOKENS=auto trains no row of {names}, which the base seems to have "
                            "learned; if you added such tokens yourself, name them in LORA_TRAIN_TOKENS")
    plan = replace(plan, generation=generation, token_ids=token_ids, untrained_ids=untrained)
    return plan.changed(messages)


def token_ids_to_train(config: Config, inputs: Inputs, base: Path, cut: Optional[int] = None
                       ) -> tuple[huggingface.TokenIds, list[int], list[int]]:
    """Return the rows of the embedding and of an untied head that LORA_TRAIN_TOKENS selects.

    `auto` selects tokens of the data that the base has not learned, and the rows that it lacks. Also return
    the other tokens that it has not learned, and the added ones of the data that it seems to have learned.
    """
    layers = ["tok_embeddings"] + ([] if config.tie_embeddings else ["output"])
    setting, tokenizer, others, learned = config.lora_train_tokens, inputs.tokenizer, [], []
    if setting != "auto":
        ids = lora.named_tokens(setting, tokenizer.special_ids)
    else:
        used, rows = inputs.used_ids(), huggingface.vocabulary_rows(huggingface.load_model_weights(base))
        parameters = model_utils.read_parameters(base, config, rows, layers=cut)
        head = parameters[f"{layers[-1]}.weight"].first_rows(rows)
        pieces = tokenizer.pieces_of_added()
        untrained = {*lora.untrained_tokens(used, tokenizer.special_ids, head.full(), pieces)}
        ids = sorted(untrained.intersection(used).union(range(rows, tokenizer.vocab_size)))
        others = sorted(untrained.difference(used, range(tokenizer.vocab_size, rows)))
        learned = sorted(pieces.keys() & {*used} - {*ids})
    return dict.fromkeys(layers, ids), others, learned
