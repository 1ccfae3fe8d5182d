"""Plants faults in a copy of the code, one at a time, and checks that the tests see each of them.

    python tests/mutations.py [--jobs N] [--only WORD]

Prints a table, and exits with 1 unless every fault is seen. Takes about twenty minutes on two idle cores.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FAILED_TESTS = Path(".pytest_cache/v/cache/lastfailed")  # written by pytest: the ids of the tests that failed
TIMEOUT = 300  # seconds for the tests of one fault


class Fault(NamedTuple):
    """A replacement in one file. The old text must occur exactly once; white space may differ."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # files or test ids, of which one must fail


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, file, old, new, tests)


MODEL, LOADERS, OPTIM = "tests/test_model.py", "tests/test_dataloaders.py", "tests/learn/test_optim.py"
OBJECTIVES, DISTILLATION = "tests/learn/test_objectives.py", "tests/learn/test_distillation.py"
ROUNDING = "tests/learn/test_rounding.py"
GRPO, ROLLOUTS = "tests/learn/test_grpo.py", "tests/system/resume/test_online_runs.py"
RESUMED = "tests/test_train.py::test_a_run_that_was_stopped_and_resumed_is_identical"
ATTENTION, STORE = "tests/model_kernels/test_attention.py", "tests/checkpoint/test_store.py"
SAVING, ELASTIC = "tests/run/test_saving.py", "tests/system/resume/test_elastic.py"
EXAMPLES, SETTINGS = "tests/data_pipeline/test_tokenize_chats.py", "tests/plan/test_load.py"
PROPERTIES = "tests/data_pipeline/test_properties.py"
DROPOUT = "tests/model_kernels/test_dropout.py::"
EXACT = "tests/parallel/test_exact_sums.py::"
SHARDED = "tests/parallel/test_sharding.py::test_a_sharded_run_equals_that_of_one_process"
HANGS, MACHINE = "tests/system/faults/test_hangs.py", "tests/system/faults/test_machine_faults.py"
HF, PREPARED = "tests/checkpoint/test_hf_format.py", f"{MACHINE}::test_finished_parts_of_a_preparation_are_synced_to_disk"
LAUNCH = "tests/system/launch/test_launch.py"
FAMILIES, FAMILY_CHATS, API = "tests/system/test_families.py", "tests/data_pipeline/test_family_chats.py", "tests/serving/test_api.py"
GGUF = "tests/scripts/test_convert_to_gguf.py"
RESTART = "tests/system/launch/test_restart.py"
SLOW_DISK = "tests/system/faults/test_slow_storage.py"
STARTS, IDENTITY, IDENTITIES = "tests/plan/test_starts.py", "tests/plan/test_identity.py", "tests/system/resume/test_identities.py"
AHEAD, EXCLUDE, FORECAST = "tests/data_pipeline/test_prepare_ahead.py", "tests/debug/test_exclude.py", "tests/observe/test_preflight.py"
MFU = "tests/learn/test_flops.py::test_mfu_is_of_the_work_and_the_peak_of_all_ranks"

FAULTS = [
    # Model
    fault("INIT_COPY: heads of the wrong group", "model.py", "repeat_interleave(config.n_heads // config.n_kv_heads, dim=0)",
          "repeat(config.n_heads // config.n_kv_heads, 1, 1)", f"{MODEL}::test_with_init_copy_a_head_adds_a_multiple_of_what_it_attends_to"),
    fault("rotary embedding: other direction", "model_kernels/attention.py", "(-sin, sin)", "(sin, -sin)", MODEL),
    fault("causal mask: off by one", "model_kernels/attention.py", "key_S <= key_S[:, None]", "key_S < key_S[:, None]",
          MODEL),
    fault("RMSNorm: no eps", "model.py", ".add_(eps)", "", MODEL),
    fault("RMSNorm: gradient through the factor is lost", "model.py", ".div_(-x.shape[-1])", ".mul_(0)", MODEL),
    fault("tied head: no gradient", "model.py", "return HeadWeight(self.weight, self.weight)",
          "return HeadWeight(self.weight.detach(), self.weight.detach())", MODEL),
    fault("chunked head: gradient not scaled", "model_kernels/head.py", "learned.mul_(factor)", "learned",
          MODEL),
    fault("chunked head: only the last chunk's gradient in bf16", "model_kernels/head.py", "self.learned[rows] +=", "self.learned[rows] =",
          f"{MODEL}::test_the_gradient_of_a_head_is_added_in_float32_over_chunks_and_slices_of_rows"),
    fault("tiles of logits: the first id of a tile is missing", "model_kernels/head.py", "(index_M1 >= ids.start)",
          "(index_M1 > ids.start)", MODEL),
    fault("grouped queries: wrong key heads", "model_kernels/attention.py", "heads.repeat_interleave(group, dim=2)",
          "heads.repeat(1, 1, group, 1)",
          f"{ATTENTION}::test_keys_and_values_are_repeated_for_a_kernel_that_takes_no_groups"),
    fault("blocks of queries: the document before is seen", "extensions/cpu_kernels.py",
          "key_J1S < first_JC1", "key_J1S < 0", ATTENTION),
    fault("blocks of queries: answers see each other", "extensions/cpu_kernels.py", "(key_J1S >= end_JC1)", "(key_J1S < 0)", MODEL),
    fault("document borders: those of the first row alone", "model_kernels/attention.py", "start_BT == index_BT - index_BT[:, :1]",
          "start_BT == index_BT", "tests/model_kernels/test_attention.py"),
    fault("document mask: earlier documents visible", "model_kernels/attention.py", "(key_S >= start_BT[..., None])", "(key_S >= 0)",
          MODEL),
    fault("RMSNorm: computed in bf16", "model.py", "x32 = x.float() normed", "x32 = x\n        normed",
          f"{HF}::test_bf16_logits_are_nearer_to_the_exact_ones_than_those_of_transformers"),

    fault("RMSNorm: computed in bf16 when compiled", "model.py", "x32 = x.float() return (x32", "x32 = x\n        return (x32", MODEL),
    fault("families: another layer without RoPE", "config.py", "(layer + 1) % self.no_rope_every != 0",
          "layer % self.no_rope_every != 0", f"{HF}", MODEL),
    fault("families: a window of one token more", "model_kernels/attention.py", "(distance_BTS < config.sliding_window)",
          "(distance_BTS <= config.sliding_window)", MODEL),
    fault("families: no bias of values", "model.py", "(self.bq, self.bk, self.bv), projected",
          "(self.bq, self.bk, nn.Identity()), projected", MODEL),
    fault("families: norms of queries keep their order", "checkpoint/huggingface.py", '"bk", "q_norm", "k_norm")',
          '"bk", "k_norm")', HF),

    # Optimizer and step
    fault("weight decay: norms decay", "learn/optim.py", "if p.ndim < 2], 0.0)", "if p.ndim < 2], config.weight_decay)", OPTIM),
    fault("AdamW: bias correction starts anew on resume", "learn/optim.py",
          "parameter.device, dtype, copy=True)", 'parameter.device, dtype, copy=True) * (entry != "step")', RESUMED),
    fault("Muon: size of the update", "learn/optim.py", "math.sqrt(max(shape))", "math.sqrt(min(shape))", OPTIM),
    fault("Muon: MUON_MOMENTUM is ignored", "learn/optim.py", "self.config.muon_momentum,", "0.95,",
          "tests/test_train_step.py"),
    fault("learning rate: warm-up off by one", "learn/optim.py", "(step + 1) / warmup",
          "step / warmup", OPTIM),
    fault("clipping: small gradients are stretched", "learn/optim.py", "/ max_norm).clamp(min=1)",
          "/ max_norm)", "tests/test_model_utils.py::test_gradients_that_are_not_finite_are_not_scaled"),
    fault("accumulation: mean of means", "train.py", "mean = total * reducer.loss_scale",
          "mean = total / run.objective.count(batch).clamp(min=1) / len(batches)",
          "tests/test_train.py::test_micro_batches_of_any_size_give_the_gradient_of_one_large_batch"),
    fault("dropout: the same masks in every step", "model_kernels/dropout.py", "SeedSequence((seed, step, row))",
          "SeedSequence((seed, row))", DROPOUT + "test_masks_of_other_seeds_steps_rows_and_places_are_independent"),
    fault("dropout: the numbers that stay are not scaled", "model_kernels/dropout.py", ".mul_(1 / (1 - self.rate))", "",
          DROPOUT + "test_the_rate_and_the_scale_are_those_of_the_setting"),
    fault("dropout: also in evaluations", "model_kernels/dropout.py", "self.rate and self.training", "self.rate",
          DROPOUT + "test_evaluation_has_no_dropout"),
    fault("rate factors: Muon ignores them", "learn/optim.py", "(group[\"lr\"], 1 - group", "(self.param_groups[0][\"lr\"], 1 - group",
          OPTIM + "::test_factors_are_the_rates_of_torchs_parameter_groups[muon]"),
    fault("characters: others are dropped", "data_pipeline/workers.py", "if model[\"type\"] == \"WordLevel\" and", "if False and",
          "tests/test_tokenizer.py::test_a_text_with_other_characters_is_a_bad_record"),

    fault("learning rate: a warm-up of one step is one of all steps", "learn/optim.py", "if config.warmup_steps < 1 else 1",
          "if config.warmup_steps <= 1 else 1", OPTIM),
    fault("DDP: gradients of bf16 weights are added, not averaged", "learn/optim.py",
          "bucket.buffer().float().div_(torch.distributed.get_world_size())", "bucket.buffer().float()",
          "tests/test_train_step.py::test_two_ranks_average_the_gradients_of_bf16_weights"),
    fault("start: START_STEP keeps the tokens of the checkpoint", "run/build.py", "tokens_seen=config.start_step * config.total_batch_size,",
          "tokens_seen=progress.tokens_seen,", "tests/test_train.py::test_start_step_counts_the_tokens_of_so_many_steps"),

    # REPRODUCIBLE
    fault("reproducible: the order of a sum depends on the rows", "extensions/reproducible.py", "while (columns := values_RC.shape[1]) > 1:",
          "return values_RC.T.contiguous().sum(dim=0)\n    while (columns := values_RC.shape[1]) > 1:",
          EXACT + "test_sums_of_rows_do_not_depend_on_the_other_rows"),
    fault("reproducible: the last micro-batch replaces the others", "extensions/reproducible.py",
          "sums.add_(values.long())", "sums.copy_(values.long())",
          EXACT + "test_a_sum_is_the_exact_one_rounded_once"),
    fault("reproducible: a gradient that does not fit wraps", "extensions/reproducible.py", "(largest <= 2.0**self.exponent) &",
          "", EXACT + "test_gradients_beyond_the_scale_are_reported"),
    fault("dropout: rows are numbered on each rank", "train.py",
          "first_micro_batch(micro_batches, ranks.rank, ranks.world_size) * config.micro_batch_size", "0",
          EXACT + "test_dropout_of_a_micro_batch_depends_on_its_place_in_the_step_and_not_on_the_rank"),
    fault("reproducible: a step is not repeated", "train.py", "while result.misfit:", "while False:",
          EXACT + "test_a_step_is_repeated_with_a_scale_that_fits"),
    fault("reproducible: NaN becomes an integer", "extensions/reproducible.py", ".where(self.not_finite == 0, torch.nan)", "+ 0 * self.not_finite",
          EXACT + "test_a_gradient_that_is_not_finite_makes_its_tensor_nan"),

    # Sharding
    fault("sharding: gradients of norms are not averaged", "learn/optim.py", "average_vectors(self.model, self.ranks)", "pass",
          f"{SHARDED}[pretrain-hybrid-4]"),
    fault("sharding: norm of the rank's own rows", "parallel/fsdp.py",
          "dist.all_reduce(squares, group=mesh.get_group(SHARD))", "pass", f"{SHARDED}[muon-full-2]"),
    fault("sharding: gradients are not summed over the copies", "learn/optim.py",
          "set_requires_all_reduce(is_last)", "set_requires_all_reduce(False)", f"{SHARDED}[pretrain-hybrid-4]"),
    fault("sharding: Muon works on a rank's own rows", "parallel/fsdp.py", "compute(torch.cat(rows, dim=1))",
          "torch.cat([compute(each) for each in rows], dim=1)", f"{SHARDED}[muon-full-2]"),
    fault("sharding: another rank's rows are read", "parallel/fsdp.py", "each * rank)",
          "0)", f"{SHARDED}[pretrain-hybrid-4]"),
    fault("sharding: norms are gathered in bf16", "parallel/fsdp.py", "if parameter.ndim < 2}",
          "if parameter.ndim < 0}", "tests/parallel/test_sharding.py::test_sines_and_norms_are_float32_over_bf16_matrices"),
    # Data
    fault("rows: every rank reads the first part", "dataloaders.py", "[self.rank]", "[0]",
          f"{PROPERTIES}::test_the_ranks_of_any_world_size_share_the_same_rows_of_a_step"),
    fault("rows: last one of an epoch is left out", "dataloaders.py",
          "np.divmod(positions, n_rows)", "np.divmod(positions, max(1, n_rows - 1))", LOADERS),
    fault("rows: the last target of the last row is missing", "dataloaders.py", "(self.token_set.tokens - 1) // self.row_tokens",
          "self.token_set.tokens // self.row_tokens", LOADERS),
    fault("ahead: rows without their last target", "extensions/preparation.py", "(tokens - 1) // row_tokens", "tokens // row_tokens", LOADERS),
    fault("ahead: equal shards have the same order", "extensions/prepare_ahead.py", "seed, epoch, source=shard)", "seed, epoch)",
          f"{AHEAD}::test_the_order_does_not_depend_on_how_much_is_prepared"),
    fault("ahead: machines may have different last shards", "extensions/prepare_ahead.py", "for each in self.rows.hashes] return",
          "for each in self.rows.hashes][:-1]\n            return", f"{AHEAD}::test_machines_with_other_shards_do_not_train_together"),
    fault("ahead: the first validation shard is read as the last", "extensions/preparation.py", "{name}-{len(files):05d}", "{name}-00000",
          f"{AHEAD}::test_validation_is_that_of_the_whole_set_while_its_last_shard_is_written"),
    fault("ahead: a chat belongs to the shard in which it begins", "extensions/prepare_ahead.py", "np.searchsorted(examples.starts[1:], new,",
          "np.searchsorted(examples.starts[:-1], new,", f"{AHEAD}::test_a_chat_is_packed_with_those_that_end_in_the_same_shard"),
    fault("ahead: held-out chats are one fewer", "extensions/prepare_ahead.py", "np.searchsorted(filled, wanted)) + 1)", "np.searchsorted(filled, wanted)))",
          f"{AHEAD}::test_held_out_chats_are_the_first_that_fill_the_rows"),
    fault("ahead: what is a target is not compared", "extensions/prepare_ahead.py", "(entry.sha256 + digest).encode()", "entry.sha256.encode()",
          f"{AHEAD}::test_other_targets_with_the_same_tokens_are_other_chats"),
    fault("ahead: rare control tokens are never sampled", "extensions/prepare_ahead.py", "sorted(unseen.difference(run.ranks.on_rank0(seen)))", "sorted(unseen)",
          f"{AHEAD}::test_control_tokens_are_sampled_once_a_shard_that_the_run_reads_has_them"),
    fault("ahead: a chat whose question fills the row is trained on", "extensions/preparation.py", "first_targets <= row_tokens", "first_targets <= row_tokens + 1",
          f"{AHEAD}::test_the_slots_of_chats_are_those_of_the_rows"),
    fault("sources: a position in CSV is that of the next row", "data_pipeline/sources.py", "Position(start.file, number) if bad", "Position(start.file, number + 1)\n                if bad",
          "tests/data_pipeline/test_sources.py::test_reading_goes_on_with_the_record_at_whose_position_it_stopped"),
    fault("sources: the last CR of a file is lost", "data_pipeline/sources.py", '+ b"\\n" * rest.endswith(b"\\r")', '+ b""',
          "tests/data_pipeline/test_sources.py::test_text_is_cut_into_documents_as_asked"),
    fault("yaml: a merged name overrides", "extensions/other_trainers.py", "if name not in names), *own]", "), *own]", SETTINGS),
    fault("start: files are not synced before the first step", "run/run.py", "sync(run.folder / run_folder.LOCK)", "pass", "tests/run/test_run_folder.py"),
    fault("exclude: a document that begins as a row's last target affects nothing", "extensions/exclude.py",
          '(first, first + self.rows.row_tokens), "right")', '(first, first + self.rows.row_tokens - 1), "right")', EXCLUDE),
    fault("split: another hash", "data_pipeline/workers.py", '.digest()[:8], "big")', '.digest()[:8], "little")',
          "tests/test_data_preparation_utils.py::test_a_set_holds_out_enough_to_measure"),
    fault("split: a large set has one document more", "data_pipeline/prepare.py", "SMALL_SET, FEW_DOCUMENTS, TAIL = 4000,",
          "SMALL_SET, FEW_DOCUMENTS, TAIL = 4001,", "tests/test_data_preparation_utils.py::test_a_set_holds_out_enough_to_measure"),
    fault("foreign tokens: doubts of the first file", "data_pipeline/shards.py", "for result in results) for key in",
          "for result in results[:1]) for key in", "tests/data_pipeline/test_shard_reader.py"),
    fault("foreign tokens: a quarter of zeros is padding", "data_pipeline/shards.py", "if 2 * zeros > tokens and", "if 4 * zeros > tokens and",
          "tests/data_pipeline/test_shard_reader.py"),
    fault("validation data: names of foreign files do not count", "data_pipeline/shards.py",
          'return "train" if words.isdisjoint(SPLIT_WORDS["validation"]) else "validation"', 'return "train"', "tests/data_pipeline/test_shard_reader.py"),
    fault("split: a prompt in two Unicode forms is two", "data_pipeline/sources.py", 'unicodedata.normalize("NFKC", text).casefold()',
          "text.casefold()", EXAMPLES),
    fault("rows: same order for every seed", "dataloaders.py", "SeedSequence([seed, epoch, source])",
          "SeedSequence([0, epoch])", LOADERS),
    fault("documents: not numbered", "dataloaders.py", "tokens_BT == self.document_start_id", "tokens_BT < 0", LOADERS),
    fault("packing: examples overlap", "dataloaders.py", "slots += each", "slots += each - 1",
          PROPERTIES),
    fault("shard header: wrong count", "data_pipeline/shards.py", "*MAGIC_AND_VERSION[dtype], tokens",
          "*MAGIC_AND_VERSION[dtype], tokens + 1", "tests/data_pipeline/test_shard_reader.py"),
    fault("preparation: shards are not synced", "data_pipeline/shards.py", "os.fsync(self.file.fileno())", "pass", PREPARED),
    fault("preparation: its name is not synced", "data_pipeline/prepare.py", "working.rename(folder) sync_folder(folder.parent)",
          "working.rename(folder)", PREPARED),
    fault("tokenizer: special ids off by one", "tokenizer.py", "name: len(ranks) + i for",
          "name: len(ranks) + 1 + i for", "tests/test_tokenizer.py"),
    fault("chat targets: end of turn left out", "data_pipeline/templates.py",
          "return [len(before), end.end()]", "return [len(before), end.start()]", "tests/data_pipeline/test_chat_templates.py"),
    fault("chats: marks of a template shift by a character", "data_pipeline/templates.py", "accumulate(map(len, pieces[:-1]))",
          "accumulate(map(len, pieces[:-1]), initial=1)", FAMILY_CHATS),
    fault("chats: the template does not see the tools", "data_pipeline/templates.py", '"documents": None, **(options or {})',
          '"documents": None', FAMILY_CHATS),
    fault("chats: calls without arguments", "data_pipeline/chats.py", 'function.get("arguments") or function.get("parameters") or {}', "{}", FAMILY_CHATS),
    fault("growth: frozen layers are trained too", "run/build.py", 'parameter.requires_grad_(".".join(name.split(".")[:2]) in trained)',
          "pass", "tests/scripts/test_resize_checkpoint.py::test_only_the_new_layers_are_trained_and_exactly_after_a_resume"),
    fault("rounding: one of the random bits is never used", "extensions/rounding.py", "(bits & 0xFFFF)", "(bits & 0x7FFF)",
          f"{ROUNDING}::test_rounding_is_unbiased_and_its_bits_are_independent"),
    fault("rounding: sums of micro-batches have the same bits in every step", "extensions/rounding.py",
          "self.number = progress.step * self.config.accumulation_steps", "self.number = 0",
          f"{ROUNDING}::test_every_sum_of_micro_batches_has_other_bits"),
    fault("rounding: Muon has the same bits at every update", "extensions/rounding.py", 'state["step"] += 1 if self.found_inf',
          'state["step"] += 0 if self.found_inf', f"{ROUNDING}::test_every_update_has_other_bits"),
    fault("rounding: a step without targets counts in the bias correction", "extensions/rounding.py", "scale, self.is_empty.float()", "scale, None",
          f"{ROUNDING}::test_clipping_in_the_backward_pass_divides_matrices_by_the_norm_of_the_step_before"),
    fault("rounding: the same bits at every update", "extensions/rounding.py", "compute(*places, updates_K)",
          "compute(*places, updates_K * 0)", f"{ROUNDING}::test_every_update_has_other_bits"),
    fault("rounding: every rank has the bits of the first rows", "extensions/rounding.py", "self.optimizer.names[matrix], first_row,", "self.optimizer.names[matrix], 0,",
          f"{ROUNDING}::test_reproducible_ranks_compute_the_bits_of_one_process"),
    fault("rounding: bf16 states are restored in float32", "learn/optim.py", 'dtype = optimizer.state_dtype if entry != "step"',
          'dtype = torch.float32 if entry != "step"', f"{ROUNDING}::test_a_resumed_run_has_the_same_bits"),
    fault("mps: updates are not clipped", "learn/optim.py", "if grad_scale is not None:\n                torch._foreach",
          "if False:\n                torch._foreach", "tests/run/test_devices.py"),
    fault("mps: the batch is copied later", "dataloaders.py", 'device.type == "cuda"  # a copy', "True  # a copy",
          "tests/run/test_devices.py"),
    fault("pairs: chosen and rejected change places", "data_pipeline/chats.py",
          "(chosen, True), (rejected, True)", "(rejected, True), (chosen, True)",
          f"{EXAMPLES}::test_every_pair_is_its_prompt_once_and_its_two_answers"),
    fault("chats: what is excluded from training is learned", "data_pipeline/chats.py",
          '{"train": train == {True}} if train', '{"train": False} if False', "tests/data_pipeline/test_chat_records.py"),
    fault("sources: all splits of a hub dataset are one", "data_pipeline/sources.py", '"split": source.split or "train", "files"', '"files"',
          "tests/data_pipeline/test_sources.py::test_all_that_decides_the_rows_of_a_hub_dataset_is_in_its_identity"),
    fault("tokenizer: a NUL joins the text before it", "tokenizer.py", r'.replace(r"\p{N}]", r"\p{N}\x00]")', "",
          "tests/test_tokenizer.py::test_many_documents_at_once_have_the_ids_of_each"),
    fault("tokenizer: another normalizer changes nothing", "tokenizer.py", '("normalizer", "pre_tokenizer", "model",',
          '("pre_tokenizer", "model",', "tests/test_tokenizer.py::test_hash_follows_content_and_not_place"),
    fault("verified files: a modification time that was put back", "data_pipeline/shards.py", "status.st_ctime_ns}", "0}",
          "tests/data_pipeline/test_shard_reader.py"),
    fault("remote: a refused certificate is asked for again", "common/remote.py", "if unknown_host or names & PERMANENT_ERRORS:",
          "if unknown_host:", "tests/common/test_remote.py"),
    fault("sample: held-out questions are learned", "scripts/sample/stories.py", "questions(held_out, 5, held_out=True)",
          "questions(held_out, 5, held_out=False)", "tests/scripts/test_sample_world.py::test_held_out_facts_are_never_trained_on"),

    # Objectives
    fault("DPO: other sign", "learn/objectives.py", "score_BP2[..., 0] - score_BP2[..., 1]",
          "score_BP2[..., 1] - score_BP2[..., 0]", OBJECTIVES),
    fault("DPO: no beta", "learn/objectives.py", "c.dpo_beta * margin_BP", "margin_BP", OBJECTIVES),
    fault("DPO: rewards without beta", "learn/objectives.py", "reward_metrics(c.dpo_beta * ratio_BP2,",
          "reward_metrics(ratio_BP2,", OBJECTIVES),
    fault("ORPO: probabilities instead of odds", "learn/objectives.py", "- log1mexp(mean_BP2)", "",
          OBJECTIVES),
    fault("SimPO: not by length", "learn/objectives.py", "simpo_beta * logprob_BP2 / length_BP2",
          "simpo_beta * logprob_BP2", OBJECTIVES),
    fault("reference: a rank without rows adds those of another", "learn/reference_cache.py", "for row, index in enumerate(indices):",
          "for row, index in enumerate(indices or missing[:1]):",
          "tests/learn/test_reference_cache.py::test_a_rank_without_rows_adds_nothing"),
    fault("GRPO: prompts of training are validated", "extensions/online.py", "held_out = run.inputs.validation_rows rows, size",
          "held_out = run.inputs.rows\n    rows, size", f"{ROLLOUTS}::test_held_out_prompts_are_answered_in_validations"),
    fault("GRPO: the error of a validation's reward", "extensions/online.py", '"val_reward_stderr": error}', '"val_reward_stderr": 2 * error}', GRPO),
    fault("GRPO: the deviation of rewards is their variance", "extensions/online.py", '"reward_std": rewards.std()', '"reward_std": rewards.var()',
          f"{ROLLOUTS}::test_the_log_has_every_answer_with_its_rewards"),
    fault("GRPO: control tokens that the base has never seen are sampled", "extensions/online.py",
          "never_sample(model, self.tokenizer.generation.get(SUPPRESSED, ()))", "pass", f"{ROLLOUTS}::test_the_log_has_every_answer_with_its_rewards"),
    fault("rewards: text between thoughts is the answer", "extensions/rewards.py", "+ text)[-1]", "+ text)[:2][-1]",
          f"{GRPO}::test_all_rewards_and_exact_match_see_the_answer_after_the_thoughts"),
    fault("rewards: what the answer is not counts", "extensions/rewards.py", r"(?:(?:is|are)\b(?! +not\b)|[:=])", r"(?:(?:is|are)\b|[:=])",
          f"{GRPO}::test_numbers_are_compared_exactly_however_they_are_written"),
    fault("rewards: the first of several answers counts", "extensions/rewards.py", "text[cue[-1].end():]", "text[cue[0].end():]",
          f"{GRPO}::test_numbers_are_compared_exactly_however_they_are_written"),
    fault("rewards: a pattern is searched at the beginning", "extensions/rewards.py", 're.search(record["pattern"], answer)',
          're.match(record["pattern"], answer)', f"{GRPO}::test_built_in_rewards"),
    fault("GRPO: clipped where that gains", "extensions/online.py", "torch.minimum(ratio_BT * advantage_BT,",
          "torch.maximum(ratio_BT * advantage_BT,", GRPO),
    fault("GRPO: mean over all tokens for each answer", "extensions/online.py",
          'torch.ones_like(stored["length_BT"]) if self.by_token else stored["length_BT"]', 'torch.ones_like(stored["length_BT"])', GRPO),
    fault("GRPO: each update has a ratio of 1", "extensions/online.py", 'stored.setdefault("sampled_BT", logprob_BT.detach())',
          "logprob_BT.detach()", GRPO),
    fault("GRPO: answers of a group draw the same numbers", "extensions/online.py", "[*key, index]", "[*key, 0]",
          f"{ROLLOUTS}::test_the_log_has_every_answer_with_its_rewards"),
    fault("GRPO: updates go on after one that is not finite", "extensions/online.py", "while updates[-1].finite and len(updates)", "while len(updates)",
          f"{ROLLOUTS}::test_after_an_update_that_is_not_finite_no_other_update_runs"),
    fault("GRPO: ranks draw the same numbers", "extensions/online.py",
          "first_micro_batch(micro_batches, ranks.rank, ranks.world_size)", "0",
          f"{ROLLOUTS}::test_two_ranks_generate_and_learn_the_same_bits"),
    fault("GRPO: an answer without a reward is compared", "extensions/online.py",
          "np.nan if answer.failure else answer.reward", "answer.reward or 0.0",
          f"{ROLLOUTS}::test_a_failing_reward_names_the_record_and_its_answer_does_not_count"),
    fault("GRPO: the reference of adapters has them, too", "run/build.py",
          "with lora.disable_adapters(model), evaluation_mode(model):", "with evaluation_mode(model):",
          f"{ROLLOUTS}::test_the_reference_of_adapters_is_the_model_without_them"),
    fault("report: the answers to the first prompt are left out", "extensions/report/data.py", "if line.group:", "if not line.group:",
          f"{ROLLOUTS}::test_the_log_has_every_answer_with_its_rewards"),
    fault("engine: rows that move together keep their values", "extensions/inference/engine.py",
          "for block in (self.cache.keys, self.cache.values): block[:, [one, other]]",
          "for block in (self.cache.keys,): block[:, [one, other]]", "tests/inference/test_engine.py"),
    fault("sampling by id: from temperature 1", "extensions/inference/engine.py", "scaled_RV.exp_()",
          "(logits_RV - logits_RV.amax(dim=-1, keepdim=True)).exp_()", "tests/inference/test_sampling.py"),
    fault("KTO: the reference point is below 0", "learn/objectives.py", "max(total / max(count, 1), 0.0)", "total / max(count, 1)", OBJECTIVES),
    fault("KTO: a bad answer is accurate if it gains", "learn/objectives.py", '"reward_accuracy": above_BP > 0, "logprob_answer"',
          '"reward_accuracy": gain_BP > point_B1, "logprob_answer"', OBJECTIVES),
    fault("KTO: a bad answer should gain", "learn/objectives.py", "c.dpo_beta * label_BP * gain_BP}", "c.dpo_beta * gain_BP}", OBJECTIVES),
    fault("KTO: each rank has its own reference point", "learn/objectives.py", "for rank in self.gather(sums) for each in rank",
          "for each in sums", OBJECTIVES),
    fault("KTO: the loss is that of the other answers", "learn/objectives.py", "self.only(batch, 1) for", "self.only(batch, -1) for", OBJECTIVES),
    fault("KTO: the weights of good and bad are exchanged", "learn/objectives.py",
          "torch.where(label_BP > 0, c.kto_desirable_weight", "torch.where(label_BP < 0, c.kto_desirable_weight", OBJECTIVES),
    fault("KTO: the answer of the same prompt is the other one", "data_pipeline/chats.py",
          "if values[index] != values[start]", "if index != start",
          "tests/data_pipeline/test_chat_records.py::"
          "test_an_unpaired_answer_is_stored_beside_that_of_another_prompt_which_is_no_target"),
    fault("on-policy distillation: also cross-entropy", "extensions/online.py", '{"distillation_weight": 1.0}', "{}", GRPO),
    fault("on-policy distillation: always own answers", "extensions/online.py",
          "rng.random() < config.distillation_lambda", "True",
          f"{ROLLOUTS}::test_a_teacher_scores_own_and_recorded_answers"),
    fault("distillation: gradient without temperature", "learn/objectives.py",
          "gradient_MV.mul_(temperature)", "gradient_MV", DISTILLATION),
    fault("LoRA: not scaled", "lora.py", "self.lora_B, self.scale)", "self.lora_B, 1.0)", "tests/test_lora.py"),
    fault("LoRA: merged without scale", "lora.py", "self.scale * (self.lora_B", "(self.lora_B",
          "tests/test_lora.py"),
    fault("LoRA: drawn from a wider range", "lora.py", "a=math.sqrt(5), generator", "a=0, generator",
          "tests/test_lora.py::test_new_adapters_are_drawn_as_pefts_are"),
    fault("LoRA: tokens among the reserved ones count as seen", "lora.py", "limit_C[2] = 2 * distance_VC", "limit_C[2] = 1 * distance_VC",
          "tests/test_lora.py::test_how_far_a_row_may_be_from_those_of_reserved_tokens"),
    fault("HellaSwag: acc_norm by tokens", "hellaswag_utils.py", "[length for task in batch for length in task.ending_characters]",
          "[length for task in batch for length in task.ending_tokens]",
          "tests/test_hellaswag_utils.py::test_made_items_are_judged_as_lm_evaluation_harness_does"),
    fault("GGUF: Qwen's heads as Llama's", "scripts/convert_to_gguf.py", 'HALVES = ("qwen2", "qwen3")', "HALVES = ()",
          GGUF),
    fault("GGUF: the context length of a file is not read", "scripts/import_checkpoint.py", '"context_length": "max_position_embeddings"}',
          '"context_length": "max_position_embedding"}', GGUF),
    fault("GGUF: rope factors are inverted", "scripts/convert_to_gguf.py", "return before / after", "return after / before", GGUF),
    fault("GGUF: the betas of YaRN are exchanged", "scripts/convert_to_gguf.py", '"rope_scaling_yarn_beta_slow": config.rope_low_freq_factor',
          '"rope_scaling_yarn_beta_slow": config.rope_high_freq_factor', GGUF),
    fault("GGUF: tokens of users control", "scripts/convert_to_gguf.py", "else kinds.USER_DEFINED", "else kinds.CONTROL", GGUF),
    fault("GGUF: no end of a turn", "scripts/convert_to_gguf.py", "[tokenizer.eot_id, *more] if", "[None, *more] if", GGUF),
    fault("server: half an end tag is shown as reasoning", "extensions/serving/api.py", "(0 if tag or is_last else max(sizes))", "0",
          "tests/serving/test_api.py::test_reasoning_is_returned_beside_the_content"),
    fault("growth: the optimizer's state is grown like weights", "scripts/resize_checkpoint.py", "old, new, is_optimizer=True)", "old, new)",
          "tests/scripts/test_resize_checkpoint.py"),
    fault("growth: a new layer has the optimizer's state of another", "scripts/resize_checkpoint.py", "if is_optimizer or re.search(",
          "if re.search(", "tests/scripts/test_resize_checkpoint.py"),
    fault("growth: a new block is not the identity", "scripts/resize_checkpoint.py", "(o_proj|down_proj)", "(o_proj)",
          "tests/scripts/test_resize_checkpoint.py"),
    fault("merging: weights are ignored", "scripts/merge_checkpoints.py", "sum(weight * tensor", "sum(tensor",
          "tests/scripts/test_merge_checkpoints.py"),

    # Checkpoints and resuming
    fault("checkpoint: hash not checked", "checkpoint/manifest.py",
          'hashes == [expected["sha256"]]', "True", STORE),
    fault("checkpoint: tree not checked", "checkpoint/manifest.py", "tree_hash(hashes) == tree", "True", STORE),
    fault("checkpoint: blocks divided between ranks", "checkpoint/manifest.py", "block_rows(rows, multiple) return min(rows,",
          "1\n    return min(rows,", STORE),
    fault("checkpoint: renamed before it is on the disk", "checkpoint/store.py", "sync(path) name =", "name =",
          f"{MACHINE}::test_every_file_of_a_checkpoint_is_on_the_disk_before_it_gets_its_name"),
    fault("async save: of the live tensors", "run/saving.py", "rows = self.kept[name].copy_(tensor.read(start, stop), non_blocking=True)",
          "rows = tensor.read(start, stop)",
          f"{SAVING}::test_training_continues_while_a_thread_writes_what_the_state_was"),
    fault("save: rows of a rank that writes others", "checkpoint/tensors.py", "start - first:stop - first", "start:stop",
          f"{ELASTIC}::test_a_checkpoint_that_is_loaded_and_saved_has_the_same_bytes"),
    fault("save: hashes in the order of ranks", "run/saving.py",
          "in sorted(parts, key=lambda each: each[0]) if", "in parts if",
          f"{SAVING}::test_hashes_of_blocks_are_joined_in_the_order_of_rows_not_of_ranks"),
    fault("save: a rank's part is not synced", "run/saving.py", "sync(self.temporary / name)", "pass",
          f"{SAVING}::test_every_rank_keeps_its_share_and_a_block_and_syncs_what_it_wrote"),
    fault("async save: completed before every rank has written", "train.py", "run.saving.is_done)", "True)",
          f"{SAVING}::test_training_continues_while_a_thread_writes_what_the_state_was"),
    fault("async save: no room is left", "run/saving.py", "needed + SPARE_MEMORY <= free", "needed <= free",
          f"{SAVING}::test_without_room_for_a_copy_training_stops_for_the_whole_save"),
    fault("retention: best one deleted", "checkpoint/store.py", "*best, *regular)", "*regular)",
          f"{STORE}::test_retention_keeps_last_best_and_protected"),
    fault("retention: what another run needs is found where it was", "checkpoint/store.py",
          'for place in (Path(content["run"]), checkpoints_dir / content["beside"]):', 'for place in (Path(content["run"]),):',
          f"{STORE}::test_a_checkpoint_that_another_run_needs_is_kept_also_if_both_are_moved_together"),
    fault("best: one that is only as good", "run/run.py", "loss < best and", "loss <= best and",
          "tests/test_train.py::test_a_validation_loss_that_is_only_as_good_is_no_new_best"),
    fault("Hugging Face: the context of the run's rows", "checkpoint/model_json.py",
          "max_seq_len = max(max_seq_len, int(c.rope_original_max_len * c.rope_scaling_factor))", "pass",
          f"{HF}::test_a_saved_folder_gives_the_same_logits_in_transformers"),
    fault("Hugging Face: another default of rms_norm_eps", "checkpoint/model_json.py", '"rms_norm_eps": 1e-6', '"rms_norm_eps": 1e-5',
          f"{HF}::test_a_missing_field_has_transformers_default"),
    fault("Hugging Face: heads not permuted", "checkpoint/huggingface.py", "if to_huggingface else",
          "if not to_huggingface else", HF),
    fault("PEFT: other names", "checkpoint/peft.py", "base_model.model.{huggingface", "base_model.{huggingface",
          "tests/test_lora.py::test_adapters_load_in_peft_and_here_to_the_bit"),
    fault("resume: a step is skipped", "train.py", "run.objective, progress.step)",
          "run.objective, progress.step + (progress.step > 0))", RESUMED),
    fault("resume: optimizer state not loaded", "run/build.py", "optimizer.load_state_tensors(", "dict(",
          RESUMED),
    fault("ledger: rows of the next step", "run/step_log.py", "all_rows(run.progress.step)",
          "all_rows(run.progress.step + 1)", "tests/observe/test_step_guards.py"),

    # Settings and errors
    fault("settings: a rule is dropped", "config.py", "if c.n_heads % c.n_kv_heads:", "if False:", SETTINGS),
    fault("settings: environment above flags", "plan/layers.py", "Layer(environment, for_this_start=True), flags]",
          "flags, Layer(environment, for_this_start=True)]", SETTINGS),
    fault("start: START_STEP may be MAX_STEPS", "plan/messages.py", "config.start_step >= max(1, config.max_steps)",
          "config.start_step > max(1, config.max_steps)", STARTS),
    fault("start: the context of a model with scaling is multiplied", "plan/starts.py", "(config.rope_scaling_factor or 1) / before)",
          "(config.rope_scaling_factor or 1) * before)", STARTS),
    fault("identity: a model is cut after one layer more", "plan/identity.py", "int(layer[1]) >= layers", "int(layer[1]) > layers", IDENTITY),
    fault("identity: shapes and types do not count", "plan/identity.py", "{name} {tensor.dtype} {tensor.shape}", "{name}", IDENTITY),
    fault("identity: a machine may hold out other data", "run/facts.py", '"held_out": inputs.validation_fingerprint', '"held_out": ""',
          f"{IDENTITIES}::test_a_machine_with_other_data_is_named"),
    fault("identity: a machine may start from another checkpoint", "run/build.py",
          "if expected and differences(expected, identity_of_start(folder)):", "if False:", f"{IDENTITIES}::test_a_machine_with_another_start_is_named"),
    fault("identity: a teacher is its weights", "run/facts.py", "json_sha256([weights_sha256(folder), read_json(folder / \"config.json\")])", "json_sha256([weights_sha256(folder)])",
          f"{IDENTITIES}::test_a_distilled_run_goes_on_with_the_teacher_that_it_had"),
    fault("start: rows that the base lacks are not trained", "run/facts.py",
          "ids = sorted(untrained.intersection(used).union(range(rows, tokenizer.vocab_size)))", "ids = sorted(untrained.intersection(used))",
          "tests/run/test_start.py::test_new_tokens_are_new_rows_which_are_trained_saved_resumed_merged_and_used"),
    fault("meet: the other ranks get another class of error", "parallel/ranks.py", 'return None, (type(error).__name__, str(error)',
          'return None, ("PaddockError", str(error)', "tests/parallel/test_collectives.py"),
    fault("exit code: always 1", "parallel/ranks.py", "error.exit_code,", "1,",
          f"{HANGS}::test_one_place_explains_every_end"),
    fault("runs: --clean deletes whatever is answered", "scripts/runs.py", 'sys.stdin.readline().strip() != "yes"',
          'sys.stdin.readline() is None', "tests/scripts/test_runs.py"),
    fault("runs: --clean offers what another run starts from", "scripts/runs.py", "or run.folder.name in others:", "or False:",
          "tests/scripts/test_runs.py::test_a_run_that_runs_and_one_that_another_starts_from_are_kept_whole"),
    fault("launcher: a rank that lost another is the cause", "scripts/launch.py", 'RankExit(report["is_secondary"],',
          "RankExit(False,", f"{LAUNCH}::test_the_cause_is_the_first_rank_that_did_not_only_lose_another"),
    fault("slow disk: lines that wait are dropped at the end", "run/log.py", "if self.file and self.unwritten:\n                    time",
          "if False:\n                    time", SLOW_DISK),
    fault("slow disk: a read is not repeated", "data_pipeline/shards.py", "if error.errno not in TRANSIENT_ERRORS:",
          "if True:", SLOW_DISK),
    fault("slow disk: the ledger counts as a step", "train.py", "log_step(run, result)\n",
          'phase("forward")(log_step)(run, result)\n', SLOW_DISK),
    fault("restart: never given up", "scripts/launch.py", "and len(idle) == IDLE_STARTS", "and len(idle) > IDLE_STARTS",
          RESTART),
    fault("restart: after a signal", "scripts/launch.py", "in RESTARTED and not ending.stopped", "in RESTARTED", RESTART),
    fault("restart: one machine decides alone", "scripts/launch.py", "all(each[\"again\"] is True for each in every)",
          "state[\"again\"]", RESTART),
    fault("restart: RESUME=never begins anew", "scripts/launch.py", "config.resume == \"never\" or Path", "Path", RESTART),
    fault("launcher: the newest folders are deleted", "scripts/launch.py", "[:-KEPT_FOLDERS]", "[KEPT_FOLDERS:]",
          f"{LAUNCH}::test_the_folders_of_the_newest_launches_are_kept"),
    fault("launcher: killed before it saved counts as preempted", "scripts/launch.py", "or was_signalled and not joined:",
          "or was_signalled:", f"{LAUNCH}::test_a_killed_rank_is_reported_with_its_likely_cause"),
    fault("files: a new name is not synced", "common/files.py", "temporary.unlink(missing_ok=True) sync_folder(path.parent)",
          "temporary.unlink(missing_ok=True)",
          f"{MACHINE}::test_a_file_that_replaces_another_is_on_the_disk_first_and_its_name_then"),
    fault("watchdog: a call with its own time-out is a hang", "parallel/hang.py", "if ACTIVITY.in_foreign_call:", "if False:",
          f"{HANGS}::test_a_call_with_its_own_time_out_is_no_hang"),
    fault("terminal: 8-bit control characters pass", "common/text.py", r"\x7f-\x9f", r"\x7f",
          "tests/run/test_run_log.py"),

    # Measuring and looking
    fault("phases: waiting for others counts as own time", "extensions/phases.py", "seconds * (not mark.waits)", "seconds",
          "tests/observe/test_phases.py"),
    fault("slow rank: one comparison is enough", "extensions/phases.py", "ENOUGH, MOST = 8.0", "ENOUGH, MOST = 4.0",
          "tests/observe/test_phases.py"),
    fault("flops: a frozen matrix has a gradient", "extensions/cost.py", "if not config.lora_enabled:", "if True:",
          "tests/learn/test_flops.py"),
    fault("check: fp32 with TF32 is as slow as without", "extensions/forecast.py", "2 if config.tf32 else 16", "16",
          f"{FORECAST}::test_the_speed_of_a_plan_is_that_of_the_precision"),
    fault("check: eight planned GPUs are as fast as one", "extensions/forecast.py", "plan.computed / (config.world_size * ASSUMED_SHARE",
          "plan.computed / (ASSUMED_SHARE", f"{FORECAST}::test_eight_planned_gpus_are_eight_times_as_fast_and_take_as_many_hours"),
    fault("check: KEEP_EVERY needs no disk", "extensions/forecast.py", "regular = config.max_steps // config.keep_every if config.keep_every else 0", "regular = 0",
          f"{FORECAST}::test_a_disk_without_room_and_a_folder_that_is_none_end_with_5"),
    fault("check: nf4 has no scales", "extensions/cost.py", '"nf4": 0.5 + FLOAT32 / 64', '"nf4": 0.5',
          "tests/learn/test_memory_estimate.py::test_the_forecast_of_a_quantised_base_counts_its_scales"),
    fault("slow rank: the step that compiles is compared", "extensions/phases.py", "steps[self.is_first_step:]", "steps",
          "tests/observe/test_phases.py"),
    fault("MFU: the peak of one rank", "extensions/profile.py", "sum(peak for peak, _ in cards)", "cards[0][0]",
          "tests/learn/test_flops.py::test_the_peak_is_the_sum_of_different_cards_and_unknown_if_one_is"),
    fault("MFU: the work of one rank", "extensions/profile.py", "for row in gathered))))", "for row in gathered[:1]))))", MFU),
    fault("replicas: the order of numbers does not matter", "run/step_log.py", "(sums_R * rows_R[start:end])", "sums_R",
          "tests/observe/test_step_guards.py::test_a_checksum_knows_the_order_of_values_of_every_type"),
    fault("at-step: the step log is not compared", "extensions/debug/history.py", "compare_step_logs(step_log, repeated)", "None, []",
          "tests/debug/test_history.py::test_a_step_that_differs_from_the_record_is_an_error_and_nothing_is_written"),
    fault("weights' checksum: every shard begins at row 0", "run/step_log.py", "rows_R[start:end]",
          "rows_R[:len(rows)]", "tests/observe/test_weight_checksums.py"),
    fault("weights' checksum: columns have the factors of rows", "run/step_log.py", "for seed in (0, 1))", "for seed in (0, 0))",
          "tests/observe/test_weight_checksums.py::test_swapped_values_change_the_checksum"),
    fault("TensorBoard: the last saved step is dropped", "extensions/trackers.py", "purge_step=step + 1", "purge_step=step",
          "tests/run/test_run_log.py"),
    fault("replay: a part begins one step late", "extensions/debug/replay.py", "if begins <= step]", "if begins < step]",
          "tests/debug/test_replay.py::test_each_part_of_a_run_is_replayed_with_its_own_settings"),
    fault("evaluation: items of padding count", "evaluation/during_run.py", "for values in each if values[0] > 0]",
          "for values in each]", "tests/evaluation/test_evaluation.py"),
    fault("evaluation: perplexity by pair", "evaluation/during_run.py", "torch.tensor(nats / targets,",
          "torch.tensor(nats / count,", "tests/evaluation/test_evaluation.py"),
    fault("samples: the header of the answer lacks its last token", "extensions/evaluate.py", ".int().argmax() + 1  #", ".int().argmax()  #",
          "tests/evaluation/test_text_scores.py::test_samples_continue_held_out_chats_after_the_whole_header_of_the_answer"),
    fault("generation: what the data holds out is asked, not VALIDATION_DATA_PATH", "extensions/evaluate.py", 'rows, examples = open_rows(config, "validation"',
          'rows, examples = open_rows(config.model_copy(update={"validation_data_path": None}), "validation"', "tests/evaluation/test_text_scores.py"),
    fault("generation: the header of the answer lacks its last token", "extensions/evaluate.py", "min(start + len(header), end) + 1)",
          "min(start + len(header), end))", "tests/evaluation/test_text_scores.py"),
    fault("samples: the same seed in every step", "extensions/evaluate.py", "seed=config.seed + step", "seed=config.seed",
          "tests/evaluation/test_evaluation.py::test_samples_of_a_step_are_the_same_and_those_of_another_step_differ"),
    fault("report: text can end its element", "extensions/report/page.py", 'for sign in "<>&"', 'for sign in ">&"', "tests/report/test_page.py"),
    fault("goodput: repeated steps count", "extensions/report/goodput.py", "kept_until = min(max(self.started, reached), last_sign)",
          "kept_until = last_sign", "tests/report/test_goodput.py"),
    fault("health: by unpaired errors", "extensions/report/health.py", "trend and trend.change()", "None", "tests/report/test_health.py"),
    fault("health: one error is proof", "extensions/report/health.py", "margin, proof = 2 *", "margin, proof = 1 *",
          "tests/report/test_health.py"),
    fault("health: a trivial rise counts", "extensions/report/paired.py", "NOT_TRIVIAL * abs(test.a)", "0", "tests/report/test_health.py"),
    fault("health: the steep start counts", "extensions/report/health.py", "curve.recent[len(curve.recent) // 2:]", "curve.recent", "tests/report/test_health.py"),
    fault("decide: arms do not share the error", "extensions/decide.py", "share = error / max(1, math.comb(len(results), 2))", "share = error",
          "tests/scripts/test_decide.py"),
    fault("decide: a bet on the wrong scale", "extensions/decide.py", "np.sqrt(squares / np.maximum(1, np.cumsum(is_finite, -1)))", "1.0 + 0 * squares",
          "tests/report/test_verdicts.py"),
    fault("decide: a t interval for one look", "extensions/decide.py", "(shrinkage ** -0.5 / error) ** (2 / n)", "(1 / error) ** (2 / n)",
          "tests/report/test_verdicts.py"),
    fault("decide: a failed run is skipped", "scripts/decide.py", "worst if (value := result_of(run, self.judge)) is None else value for run in runs",
          "value for run in runs if (value := result_of(run, self.judge)) is not None", "tests/scripts/test_decide.py"),
    fault("comparison: a failed run shortens the others", "extensions/report/compare.py", "(all_failed or not has_failed(run))", "True",
          "tests/report/test_compare.py"),
    fault("paired test: at the first common step", "extensions/report/compare.py", "b, max(common)", "b, min(common)",
          "tests/report/test_compare.py"),

    # Generation and serving
    fault("cache: a token does not attend to itself", "extensions/inference/engine.py",
          "self.index_S[:self.end] <= places_BT", "self.index_S[:self.end] < places_BT",
          "tests/inference/test_engine.py", MODEL),
    fault("engine: a row in use is assigned to another request", "extensions/inference/engine.py",
          "if source.request or shared < len(source.cached)", "if shared < len(source.cached)",
          "tests/inference/test_engine.py"),
    fault("cache: a grouped query attends beyond its row", "model_kernels/attention.py",
          "masked_fill_(~mask_B1TS[:, :, :, None], -torch.inf)", "masked_fill_(~mask_B1TS[:, :, :, None], 0)",
          "tests/model_kernels/test_attention.py"),
    fault("rollouts: the weights stay packed", "extensions/inference/weights.py",
          "layer.weight = weight", "pass", "tests/inference/test_weights.py"),
    fault("engine: presence counts each time", "extensions/inference/engine.py", "self.samplings.presence_B1 * (self.counts_RV > 0)",
          "self.samplings.presence_B1 * self.counts_RV", f"{API}::test_penalties_are_subtracted_by_openais_formula"),
    fault("engine: the row that was freed last is overwritten", "extensions/inference/engine.py", "key=lambda row: row.freed_at", "key=lambda row: -row.freed_at",
          "tests/inference/test_engine.py"),
    fault("log: answers of an interrupted step are dropped", "run/log.py", '(name in ("ledger", "rollouts") or is_measured)',
          '(name == "ledger" or is_measured)', "tests/run/test_run_log.py"),
    fault("mixture: phases begin too early", "data_pipeline/mixture.py", "round(phase.until * steps)", "int(phase.until * steps)",
          "tests/data_pipeline/test_mixture.py"),
    fault("card: padding of the vocabulary is trained", "extensions/report/console.py", "(min(len(weight), vocab_size),", "(len(weight),", "tests/run/test_model_card.py"),
    fault("sampling: top-p without the token that passes it", "extensions/inference/engine.py",
          "before_RW < top_p_R1", "before_RW + probability_RW < top_p_R1",
          "tests/inference/test_sampling.py"),
    fault("stream: the beginning of a stop string is emitted", "extensions/inference/text.py",
          "range(1, len(stop))", "range(1, 1)", "tests/inference/test_text_stream.py"),
    fault("server: pages of other origins are served", "extensions/serving/guard.py", "if origin is not None and", "if False and",
          "tests/serving/test_limits.py"),
    fault("server: the API key is not required", "extensions/serving/guard.py", "if self.key and path", "if False and path",
          "tests/serving/test_limits.py"),
    fault("server: no limit on completions", "extensions/serving/api.py", "min(room, self.max_tokens, limit or room)",
          "min(room, limit or room)", "tests/serving/test_api.py"),
    fault("server: a completion goes on after its client disconnects", "extensions/serving/batcher.py",
          "self._answers.pop(answer).cancel() self._inbox.put(lambda: self._cancel(answer))", "self._answers.pop(answer).cancel()",
          "tests/serving/test_api.py"),
    fault("model card: an edit is damage", "checkpoint/store.py", "if name in (CARD, MANIFEST):", "if name == MANIFEST:",
          "tests/run/test_model_card.py"),
]


def copy_tree(folder: Path) -> Path:
    """Copy the tracked files as they are now, with bytecode that notices a change within the same second."""
    git = ["git", "ls-files", "-z"]
    names = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    compileall = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*compileall, folder], check=True)
    return folder


def failing_tests(copy: Path, tests: list[str], *flags: str) -> list[str]:
    """Run tests with flags of pytest; return the ids of those that failed. A RuntimeError: they could not be run, or hang."""
    (copy / FAILED_TESTS).unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    pytest = [sys.executable, "-m", "pytest", "-q", *flags, *tests]
    process = subprocess.Popen(pytest, cwd=copy, env=environment, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise RuntimeError(f"the tests take more than {TIMEOUT} s") from None
    if process.returncode not in (0, 1):
        last = (output.strip() or "no output").splitlines()[-1]  # nothing if a signal killed it
        raise RuntimeError(f"pytest ended with {process.returncode}: {last}")
    return [*json.loads((copy / FAILED_TESTS).read_text())] if process.returncode else []


def planted(tree: Path, fault: Fault) -> tuple[str, str]:
    """The text of a fault's file without it and with it. A RuntimeError: it does not fit exactly once."""
    text, pattern = (tree / fault.file).read_text(encoding="utf-8"), r"\s+".join(map(re.escape, fault.old.split()))
    if (count := len(re.findall(pattern, text))) != 1:
        raise RuntimeError(f"{fault.file} has {fault.old!r} {count} times")
    return text, re.sub(pattern, lambda _: fault.new, text)


def plant(copy: Path, fault: Fault) -> str:
    """Plant a fault in a copy of the tree, and return the file's text without it. A RuntimeError: it does not fit."""
    text, changed = planted(copy, fault)
    compile(changed, fault.file, "exec")  # a fault is wrong code, not a syntax error
    (copy / fault.file).write_text(changed, encoding="utf-8")
    return text


class Outcome(NamedTuple):
    seen_by: list[str]
    problem: str
    seconds: float


def examine(copies: "SimpleQueue[Path]", fault: Fault) -> Outcome:
    copy, started = copies.get(), time.monotonic()
    try:
        text = plant(copy, fault)
        try:
            seen_by = failing_tests(copy, [*fault.tests], "-x")
        finally:
            (copy / fault.file).write_text(text)
        problem = "" if seen_by else "NOT SEEN"
    except RuntimeError as error:
        seen_by, problem = [], f"ERROR: {error}"
    finally:
        copies.put(copy)
    return Outcome(seen_by, problem, time.monotonic() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that are tested at a time")
    parser.add_argument("--only", default="", help="only the faults whose name or file contains this")
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if args.only in fault.name or args.only in fault.file]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            copies.put(copy_tree(Path(folder, str(number))))
        print("| fault | seen by | seconds |\n|---|---|---|", flush=True)
        seen_by, problems, started = set(), 0, time.monotonic()
        for fault, outcome in zip(faults, pool.map(lambda fault: examine(copies, fault), faults)):
            problems += bool(outcome.problem)
            seen_by |= {*outcome.seen_by}
            shown = outcome.problem or ", ".join(outcome.seen_by).replace("|", "\\|")
            print(f"| {fault.name} | {shown} | {outcome.seconds:.1f} |", flush=True)
        # A test that fails without the fault too has not seen it.
        for test in failing_tests(copies.get(), sorted(seen_by)) if seen_by else []:
            problems += 1
            print(f"ERROR: {test} fails without a fault too")
    print(f"{len(faults)} faults, {problems} problems, {time.monotonic() - started:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
