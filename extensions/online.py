"""GRPO: the run's model generates answers, which are rewarded; distillation also uses them.

An answer is a function of the weights and of (seed, step, place of its prompt in the step, index in the
group). The bits of a matmul depend on its shape, so the micro-batches that are answered together do not
depend on the ranks: one that needs some of their answers generates all of them. A step that was killed is
repeated with the same bits.

Shape suffixes: B rows, each with a prompt and answers to it; T tokens; P prompts; G answers to a prompt.
"""

import json
import os
import re
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, compress, islice
from select import select
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn

import extensions.prompts  # noqa: F401 (registers its rows)
import train
from checkpoint import schema
from common.activity import phase, tick
from common.errors import DataError, SettingsError
from common.files import json_sha256
from common.text import ROOT, counted
from config import Config
from data_pipeline.chats import options_in, prompt_of
from data_pipeline.sources import columns_of
from data_pipeline.templates import load_chat_format
from dataloaders import Batch, first_micro_batch
from evaluation.during_run import RECORDED_TEXTS, VALIDATIONS, Result, Row
from extensions.decide import standard_error
from extensions.inference.engine import LENGTH_MULTIPLE, Engine, Request, Sampling, never_sample
from extensions.inference.weights import packed_weights
from extensions.report.numbers import number_text
from extensions.rewards import ANSWERS, BUILT_IN, answer_column, final_answer, text_of, with_answer
from extensions.settings import answered_together, answers_per_row, reward_terms
from learn.objectives import LossSum, Prepared, token_logprobs
from learn.optim import Reducer
from model import Transformer, evaluation_mode
from model_kernels.attention import SHARED_PREFIX
from model_kernels.head import IGNORE_INDEX
from parallel.ranks import RunContext, collective
from run.run import Inputs, Run, StepResult
from tokenizer import SUPPRESSED

REPLY_SECONDS = 10.0  # for an answer, of all functions together
START_SECONDS = 120.0  # for the import of the reward functions
POLL_SECONDS = 1.0
WINDOW_STEPS = 20  # of equal rewards until a warning
LOOKED_AT = 500  # records at the start of a run
SHOWN_FAILURES, SHOWN_RECORD = 3, 200  # of a step; characters
# The process appends these folders to its path: that of the command, and ours.
SERVE = ("import sys, json; names, *more = json.loads(sys.argv[1]); sys.path.insert(0, more[-1]); "
         "from extensions.rewards import serve; sys.path[:1] = []; sys.path += more; serve(names)")


class Rewards:
    """Scores answers by the functions of a setting in another process, which is started again if it dies."""

    def __init__(self, setting: str, terms: Sequence[tuple[str, float]]):
        self.setting, self.process, self.columns = setting, None, []
        self.names, self.weights = zip(*terms)

    def start(self) -> None:
        """Start the process, unless it runs. Raises SettingsError if a function cannot be imported."""
        if self.process:
            return
        arguments = json.dumps([self.names, os.getcwd(), str(ROOT)])
        # Ctrl-C does not reach a new session.
        self.process = subprocess.Popen([sys.executable, "-c", SERVE, arguments], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, start_new_session=True)
        weakref.finalize(self, end, self.process)
        if isinstance(reply := self._reply(START_SECONDS), str):
            if self.process:
                end(self.process)
            self.process = None  # another start fails, too
            raise SettingsError(f"{self.setting}: a function cannot be imported: {reply}; "
                                "modules are searched in the folder of the command and in PYTHONPATH, and "
                                "functions take prompt, answer and record")
        self.columns = reply

    def check(self, examples: Sequence[tuple[str, str]], advice: str) -> list[str]:
        """Return notes on the columns of prompts with records; raise an error if all lack one.

        The functions declare these, and are called with the reference answers to the first prompts.
        """
        self.start()
        read = [json.loads(record) for _, record in examples]
        records = [*map(with_answer, read)]
        lacking = Counter(name for each in records for name in self.columns if each.get(name) is None)
        missing, notes = [name for name, count in lacking.items() if count == len(records)], []
        replies = [self(prompt, str(each.get("answer", "")), record) for (prompt, record), each
                   in zip(examples[:SHOWN_FAILURES], records) if not missing]
        failures = [reply for reply in replies if isinstance(reply, str)]
        if replies and len(failures) == len(replies):
            asked = re.match("KeyError: '(.+?)'", failures[0])
            missing = [name for name in asked.groups() if name not in records[0]] if asked else []
            notes.append(f"{self.setting} fails for the records' own answers: {failures[0]}")
            if not missing and {*self.names} <= BUILT_IN.keys():
                raise SettingsError(f"{notes[-1]}; correct the data, or set another REWARD")
        if missing:
            raise SettingsError(f"{self.setting} reads a column {missing[0]!r}, but the records have no "
                                f"{missing[0]!r}: they have {columns_of(read[0])}; "
                                f"{advice.format(missing[0])}")
        if {*self.names} & {"exact", "contains"} and (
                marked := [each["answer"] for each in records if "\n####" in str(each.get("answer"))]):
            notes.append(f"{self.setting} compares the whole of answers such as {marked[0][-40:]!r}; "
                         "REWARD=math compares the number after ####")
        notes += [f"{self.setting} reads the column {name!r} as the answer of {counted(count, 'record')}"
                  for name, count in Counter(map(answer_column, read)).items()
                  if name != "answer" and "answer" in self.columns]
        return notes + [f"{self.setting} reads {name!r}, which {count:,} of {counted(len(read), 'record')} "
                        "lack; answers to these are left out" for name, count in lacking.items()]

    def __call__(self, prompt: str, answer: str, record: str) -> list[float | bool] | str:
        """Return an answer's reward by each function, and if one did not understand it; or why not."""
        self.start()
        with suppress(BrokenPipeError):
            self.process.stdin.write((json.dumps([prompt, answer, record]) + "\n").encode())
            self.process.stdin.flush()
        return self._reply(REPLY_SECONDS)

    def _reply(self, seconds: float) -> list[float | bool] | str:
        """Return the next reply; end the process if it is late."""
        deadline, process = time.monotonic() + seconds, self.process
        while (left := deadline - time.monotonic()) > 0:
            tick()
            if select([process.stdout], [], [], min(left, POLL_SECONDS))[0]:
                break
        # A reply is written at once, so that a readable line is whole.
        line = process.stdout.readline() if left > 0 else b""
        if line:
            return json.loads(line)
        end(process)
        self.process = None
        if left > 0:
            return f"the process of the functions ended with code {process.returncode}"
        return f"no reply within {seconds:g} seconds"


def end(process: subprocess.Popen) -> None:
    """Kill a process, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            pipe.close()


class Answer(NamedTuple):
    """An answer, and what the functions of REWARD said of it. All are gathered from all ranks as JSON."""

    tokens: int
    complete: bool  # it ends in a stop token
    reward: Optional[float]  # the weighted sum; None after a failure
    rewards: list[float]
    failure: str
    record: str  # JSON; empty unless it is needed
    prompt: str = ""
    text: str = ""
    advantage: float = 0.0
    misunderstood: bool = False  # by `math`, and therefore worth 0


class Rollouts:
    """Generates and rewards the answers of each step."""

    def __init__(self, model: Transformer, config: Config, tokenizer, context: RunContext):
        self.model, self.config, self.tokenizer, self.context = model, config, tokenizer, context
        self.chat_format = load_chat_format(tokenizer)
        self.rewards = Rewards(f"REWARD={config.reward}", reward_terms(config))
        self.equal_rewards_steps, self.is_reported = 0, False
        self.together = answers_per_row(config)
        longest = config.max_seq_len + (self.together - 1) * config.answer_tokens
        # A compiler wants rows of one length, and the kernels of a GPU plan for each new one.
        multiple = longest if config.compile else LENGTH_MULTIPLE.get(context.ranks.device.type, 1)
        self.row_size = multiple, longest

    @classmethod
    def of(cls, run: Run) -> "Rollouts":
        rollouts = cls(run.model, run.config, run.inputs.tokenizer, run.context)
        rollouts.check(run.inputs)
        return rollouts

    def check(self, inputs: Inputs) -> None:
        """Report where answers are in the records; raise an error if these lack what is read."""
        advice = "prepare the prompts with --map {}=COLUMN, or set another REWARD"
        config, notes = self.config, []
        if config.distillation_enabled:
            advice += ", or VALIDATE_EVERY=0"
        for rows in filter(None, (inputs.rows, inputs.validation_rows)):
            chosen = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), LOOKED_AT)).astype(int))
            batches = [rows(np.array([row])) for row in chosen.tolist()]
            if rows is inputs.validation_rows or not config.distillation_enabled:
                examples = [self.example(batch, 0) for batch in batches]
                notes += [*self.rewards.check(examples, advice), *self.unsayable(examples)]
            elif config.distillation_lambda < 1:
                for batch in batches:
                    self.recorded(batch)
        for note in dict.fromkeys(notes):
            self.context.log.info(note)

    def unsayable(self, examples: Sequence[tuple[str, str]]) -> Iterator[str]:
        """Yield a note if the tokenizer changes an answer that the model's own must equal or contain."""
        if {*self.rewards.names} & {"exact", "contains"}:
            texts = [text_of(with_answer(json.loads(record)).get("answer")) for _, record in examples]
            for text in texts:
                said = self.tokenizer.decode(self.tokenizer.encode(text))
                if final_answer(said) != final_answer(text):
                    yield (f"{self.rewards.setting} never finds {text!r:.60}, since the tokenizer writes it "
                           f"as {said!r:.60}; correct the data")
                    return

    def example(self, prompts: Batch, row: int) -> tuple[str, str]:
        """Return the text and the record of a prompt."""
        length = int(prompts.stored["prompt_B1"][row])
        record = bytes(filter(None, prompts.stored["record_BR"][row].tolist())).decode()
        return self.tokenizer.decode(prompts.tokens_BT[row, :length].tolist()), record

    @collective
    def __call__(self, prompts: list[Batch], step: int, count) -> Prepared:
        """Return the batches of answers to a rank's prompts, with their units by `count(batch)`."""
        config, ranks = self.config, self.context.ranks
        prompts = [batch.host or batch for batch in prompts]  # each look at a GPU's would wait for it
        micro_batches = config.rows_per_step // config.micro_batch_size
        number = first_micro_batch(micro_batches, ranks.rank, ranks.world_size)
        is_logged = config.log_every and ((step + 1) % config.log_every == 0 or step + 1 == config.max_steps)
        batches, answers, units = [], [], 0
        with phase("generate"):
            answered = self.answer(prompts, step, number)
        for batch, ids in zip(prompts, answered):
            with phase("reward"):
                rewarded = self.reward(batch, ids, with_values=not config.distillation_enabled)
                advantages_PG = advantages(self.by_group(rewarded), scaled=config.grpo_loss != "dr_grpo")
                trained = training_batch(batch, ids, advantages_PG, self.together, *self.row_size)
                batches.append(trained.to(ranks.device))
            units += int(count(trained))
            is_kept = kept(batch).repeat_interleave(config.grpo_group).tolist()
            for answer, advantage in compress(zip(rewarded, advantages_PG.flatten().tolist()), is_kept):
                answers.append(answer._replace(advantage=advantage) if is_logged else answer._replace(
                    prompt="", text="", record=answer.record if answer.failure else ""))
        every = [Answer(*each) for rank in ranks.all_gather_json(answers) for each in rank]
        if is_logged:
            for number, each in enumerate(every):
                self.context.log.append("rollouts", {
                    "step": step + 1, "group": number // config.grpo_group, "prompt": each.prompt,
                    "answer": each.text, "reward": each.reward, "advantage": each.advantage,
                    "tokens": each.tokens, "rewards": dict(zip(self.rewards.names, each.rewards))})
        return Prepared(batches, units, self.measure(every, step) if every else {})

    @collective
    def answer(self, prompts: list[Batch], step: int, number: int) -> list[list[list[int]]]:
        """Return the answers to each of a rank's micro-batches, from micro-batch `number` of the step on."""
        config, ranks = self.config, self.context.ranks
        size, known = config.micro_batch_size // config.grpo_group, [*map(prompt_ids, prompts)]
        together = answered_together(config, self.model.compute_dtype.itemsize, ranks.device.type)
        first = number  # of those known
        if together > 1:  # also those of other ranks
            first, known = 0, [ids for rank in ranks.all_gather_json(known) for ids in rank]

        def generates(each: int) -> bool:
            # An answer's number in the group is lower, so that it draws other numbers.
            rng = np.random.default_rng((config.seed, step, each * size, config.grpo_group))
            return not config.distillation_enabled or rng.random() < config.distillation_lambda

        answers: dict[int, list[list[int]]] = {}
        for begin in range(number // together * together, number + len(prompts), together):
            end = min(begin + together, first + len(known))
            chosen = [each for each in range(begin, end) if generates(each)]
            places = [each * size + row for each in chosen for row in range(size)]
            ids = [ids for each in chosen for ids in known[each - first]]
            keys = [(config.seed, step, place) for place in places]
            written = iter(self.generate(ids, config.grpo_group, keys) if ids else ())
            answers |= {each: [*islice(written, config.micro_batch_size)] for each in chosen}
        return [answers.get(each) or self.recorded(batch) for each, batch in enumerate(prompts, number)]

    def generate(self, prompts: Sequence[list[int]], group: int,
                 keys: Optional[Sequence[tuple[int, int, int]]] = None) -> list[list[int]]:
        """Return `group` answers to each prompt, with the stop token if they end in one.

        Args:
            keys: of each prompt, the seed, the step, and its place in the step; None = greedy answers.
        """
        config, groups = self.config, []
        for ids, key in zip(prompts, keys or [None] * len(prompts)):
            requests = []
            for index in range(group):
                seed = np.random.SeedSequence([*key, index] if key else 0)
                draws = np.random.default_rng(seed).random(config.answer_tokens, np.float32)
                sampling = Sampling(temperature=1.0 if key else 0.0, by_id=True)
                requests.append(Request(ids, config.answer_tokens, sampling, draws=torch.from_numpy(draws)))
            groups.append(requests)
        rows, model = len(groups) * group, self.model
        never_sample(model, self.tokenizer.generation.get(SUPPRESSED, ()))

        def run(requests: list[Request], until_first: bool) -> None:
            for request in requests:
                engine.add(request)
            while not (engine.idle or until_first and all(request.output_ids for request in requests)):
                tick()
                for request in engine.step():
                    if request.output_ids[-1] in self.chat_format.stop_ids:
                        engine.cancel(request)

        with evaluation_mode(model), torch.compiler.set_stance("force_eager"), packed_weights(model):
            # A new engine has no history: a prefix in the cache would be computed in other shapes.
            prefill_tokens = config.micro_batch_size * config.max_seq_len
            engine = Engine(model, rows, config.max_seq_len + 1, prefill_tokens)
            # The first answer of each group computes the prompt; the others copy it.
            run([requests[0] for requests in groups], until_first=True)
            run([request for requests in groups for request in requests[1:]], until_first=False)
        return [request.output_ids for requests in groups for request in requests]

    def recorded(self, prompts: Batch) -> list[list[int]]:
        """Return the answer in the record of each prompt, with its end, for each answer of a group."""
        answers = []
        for row in range(len(prompts.tokens_BT)):
            record = json.loads(text := self.example(prompts, row)[1])
            answer = with_answer(record).get("answer")
            if not isinstance(answer, (str, int, float)):
                raise DataError(f"DISTILLATION_LAMBDA={self.config.distillation_lambda} needs an answer in "
                                f"each record ({', '.join(ANSWERS)}), but {text[:SHOWN_RECORD]} has none")
            messages = prompt_of("", record).messages
            options = options_in(record, self.chat_format.all_fields)
            message = {"role": "assistant", "content": text_of(answer)}
            ids = self.chat_format.encode_answer(messages, message, options)[:self.config.answer_tokens]
            answers += [ids] * self.config.grpo_group
        return answers

    def reward(self, prompts: Batch, answers: list[list[int]], with_values: bool = True) -> list[Answer]:
        """Return the answers, equally many for each prompt, with rewards if `with_values`, else with 0."""
        rewarded, group = [], len(answers) // len(prompts.tokens_BT)
        for number, ids in enumerate(answers):
            if number % group == 0:
                prompt, record = self.example(prompts, number // group)
            complete = ids[-1] in self.chat_format.stop_ids
            text = self.tokenizer.decode(ids[:-1] if complete else ids)
            reply, failure = self.rewards(prompt, text, record) if with_values else [False], ""
            if isinstance(reply, str):
                reply, failure = [False], reply
            *values, misunderstood = reply
            reward = None if failure else sum(map(float.__mul__, self.rewards.weights, values))
            rewarded.append(Answer(len(ids), complete, reward, values, failure, record, prompt, text,
                                   misunderstood=misunderstood))
        return rewarded

    def by_group(self, answers: Sequence[Answer]) -> torch.Tensor:
        """Return (P, G) float64 rewards; NaN after a failure."""
        rewards = [np.nan if answer.failure else answer.reward for answer in answers]
        return torch.tensor(rewards, dtype=torch.float64).view(-1, self.config.grpo_group)

    def measure(self, answers: list[Answer], step: int) -> dict[str, float]:
        """Return the metrics of a step's answers. Warn of failures, and of rewards that teach nothing."""
        lengths = {"answer_tokens": np.mean([answer.tokens for answer in answers]).item(),
                   "answers_cut": 1 - np.mean([answer.complete for answer in answers]).item()}
        if self.config.distillation_enabled:
            return lengths
        warn, failed = self.context.log.warn, [answer for answer in answers if answer.failure]
        for answer in failed[:SHOWN_FAILURES]:
            warn(f"step {step + 1}: REWARD={self.config.reward} failed for the record "
                 f"{answer.record[:SHOWN_RECORD]}: {answer.failure}; the answer is left out")
        if len(failed) > SHOWN_FAILURES:
            warn(f"step {step + 1}: REWARD failed for {len(failed)} of {len(answers)} answers")
        self.check_any(answers, f"step {step + 1}")
        lengths |= self.count_misunderstood(answers, f"step {step + 1}")
        rewards = np.array([answer.reward for answer in answers if not answer.failure])
        equal = all_equal(self.by_group(answers)).double().mean().item()
        self.equal_rewards_steps = self.equal_rewards_steps + 1 if equal == 1 else 0
        if self.equal_rewards_steps == WINDOW_STEPS:
            warn(f"step {step + 1}: for {WINDOW_STEPS} steps, all answers to a prompt had equal rewards, "
                 "so the model learns nothing; use prompts that it sometimes solves, a reward with more "
                 "steps, or a larger GRPO_GROUP")
        return {"reward": rewards.mean().item(), "reward_std": rewards.std().item(),
                "equal_groups": equal, **lengths}

    def count_misunderstood(self, answers: Sequence[Answer], place: str) -> dict[str, float]:
        """Return the share of answers whose value a reward does not understand; warn of the first ones."""
        if not {"math", "math_verify"} & {*self.rewards.names}:
            return {}
        count = sum(answer.misunderstood for answer in answers)
        if count and not self.is_reported:
            self.is_reported = True
            self.context.log.warn(f"{place}: REWARD={self.config.reward} finds no single value in {count} of "
                                  f"{len(answers)} answers, which are worth 0 (answers_misunderstood in "
                                  "metrics.jsonl, their texts in rollouts.jsonl); reported once")
        return {"answers_misunderstood": count / len(answers)}

    def check_any(self, answers: Sequence[Answer], place: str) -> None:
        """Raise DataError if no answer has a reward; all ranks have the same answers."""
        if all(answer.failure for answer in answers):
            error = DataError(f"{place}: REWARD={self.config.reward} failed for all {len(answers)} answers, "
                              f"first for the record {answers[0].record[:SHOWN_RECORD]}: "
                              f"{answers[0].failure}; correct the function or the data")
            error.on_all_ranks = True
            raise error


def prompt_ids(prompts: Batch) -> list[list[int]]:
    lengths = prompts.stored["prompt_B1"].flatten().tolist()
    return [ids[:length] for ids, length in zip(prompts.tokens_BT.tolist(), lengths)]


def kept(prompts: Batch) -> torch.Tensor:
    """Return (P,): whether a prompt counts. One that EXCLUDE_DATA leaves out is answered all the same."""
    return prompts.stored.get("kept_BP", torch.ones(len(prompts.tokens_BT), 1)).flatten() > 0


def training_batch(prompts: Batch, answers: list[list[int]], advantages_PG: torch.Tensor, together: int,
                   multiple: int, most: int) -> Batch:
    """Return rows of a prompt, `together` of its answers as targets, and padding.

    The prompt is computed once in a row: all but its last token are a shared prefix of its answers, each of
    which is a document that begins with the prompt's last token.

    Args:
        multiple: of which the rows' length is one, but at most `most`.
    """
    rows, group, is_kept = [], advantages_PG.shape[1], kept(prompts).tolist()
    for first in range(0, len(answers), together):
        prompt = first // group
        *prefix, last = prompts.tokens_BT[prompt, :int(prompts.stored["prompt_B1"][prompt])].tolist()
        rows.append([(token, IGNORE_INDEX, SHARED_PREFIX, 0.0, 1) for token in prefix])
        for number, ids in enumerate(answers[first:first + together]):
            advantage = float(advantages_PG.view(-1)[first + number])
            targets = ids if is_kept[prompt] else [IGNORE_INDEX] * len(ids)
            rows[-1] += [(token, target, number + 1, advantage, len(ids))
                         for token, target in zip([last, *ids[:-1]], targets)]
    length, real = min(-(-max(map(len, rows)) // multiple) * multiple, most), sum(map(len, rows))
    padded = [row + [(0, IGNORE_INDEX, together + 1, 0.0, 1)] * (length - len(row)) for row in rows]
    tokens_BT, targets_BT, document_ids_BT, advantage_BT, length_BT = (
        torch.tensor(column).view(len(rows), length) for column in zip(*chain.from_iterable(padded)))
    target_index_M = (targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten()
    return Batch(tokens_BT, targets_BT, document_ids_BT.int() if together > 1 else None, target_index_M,
                 {"advantage_BT": advantage_BT, "length_BT": length_BT}, tokens_BT.numel() - real)


STD_EPSILON = 1e-4  # added to the standard deviation of a group's rewards, as in TRL


def advantages(rewards_PG: Tensor, scaled: bool) -> Tensor:
    """Return the rewards minus the mean of their group, divided by its standard deviation if `scaled`.

    NaN marks an answer without a reward: it does not count in its group, and its advantage is 0.
    Source: Shao et al. 2024, section 4.1.2 (arXiv:2402.03300); without scaling Liu et al. 2025.
    """
    valid_PG = ~rewards_PG.isnan()
    count_P1 = valid_PG.sum(dim=1, keepdim=True)
    mean_P1 = rewards_PG.nansum(dim=1, keepdim=True) / count_P1.clamp(min=1)
    centered_PG = torch.where(valid_PG & ~all_equal(rewards_PG)[:, None], rewards_PG - mean_P1, 0)
    if not scaled:
        return centered_PG
    variance_P1 = centered_PG.square().sum(dim=1, keepdim=True) / (count_P1 - 1).clamp(min=1)
    return centered_PG / (variance_P1.sqrt() + STD_EPSILON)


def all_equal(rewards_PG: Tensor) -> Tensor:
    """Return (P,): whether the rewards of a group are equal, so that it teaches nothing."""
    highest_P = rewards_PG.nan_to_num(nan=-torch.inf, posinf=torch.inf).amax(dim=1)
    return highest_P <= rewards_PG.nan_to_num(nan=torch.inf, neginf=-torch.inf).amin(dim=1)


class GRPO:
    """Group relative policy optimization: the clipped ratio to the policy that answered, times the advantage.

    A unit is an answer, or with GRPO_LOSS=dapo a token. `batch.stored` has `advantage_BT` and `length_BT` of
    each token's answer, and from the first update on `sampled_BT`: this update's own log-probabilities, so
    that its ratio is exactly 1.
    Source: Shao et al. 2024, eq. 3 and 4 (arXiv:2402.03300), for grpo; Liu et al. 2025 (arXiv:2503.20783) for
    dr_grpo; Yu et al. 2025, eq. 8 (arXiv:2503.14476) for dapo.

    Args:
        rollouts: turns the prompts of a step into batches of answers (`extensions.online`).
        reference: from a batch to the (B, T) log-probabilities of the reference, without a graph.
    """

    def __init__(self, config: Config, rollouts: Optional[Callable] = None,
                 reference: Optional[Callable[..., Tensor]] = None):
        self.config, self.rollouts, self.reference = config, rollouts, reference
        self.by_token = config.grpo_loss == "dapo"
        if config.grpo_updates > 1:
            self.take_step = take_updates

    def prepare_step(self, prompts: list, step: int) -> Prepared:
        return self.rollouts(prompts, step, self.count)

    def count(self, batch) -> Tensor:
        is_target_BT = batch.targets_BT != IGNORE_INDEX
        length_BT = 1 if self.by_token else batch.stored.get("length_BT", 1)  # prompts have no answers yet
        return (is_target_BT / length_BT).sum().round().long()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        c, stored = self.config, batch.stored
        is_target_BT = batch.targets_BT != IGNORE_INDEX
        logprob_BT = token_logprobs(model, batch)
        sampled_BT = stored.setdefault("sampled_BT", logprob_BT.detach())
        ratio_BT, advantage_BT = (logprob_BT - sampled_BT).exp(), stored["advantage_BT"]
        clipped_BT = ratio_BT.clamp(1 - c.grpo_clip_low, 1 + c.grpo_clip_high)
        gain_BT = torch.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
        loss_BT, metrics = -gain_BT, {"entropy": -logprob_BT, "clipped": gain_BT != ratio_BT * advantage_BT}
        if self.reference:
            if "reference_BT" not in stored:
                stored["reference_BT"] = self.reference(batch)
            gap_BT = stored["reference_BT"] - logprob_BT
            # Schulman 2020, "Approximating KL divergence", k3: unbiased, and never negative.
            metrics["kl"] = gap_BT.expm1() - gap_BT
            loss_BT = loss_BT + c.grpo_beta * metrics["kl"]

        def mean(value_BT: Tensor) -> Tensor:
            return (value_BT * is_target_BT / divisor_BT).sum()

        divisor_BT = torch.ones_like(stored["length_BT"]) if self.by_token else stored["length_BT"]
        sums = {name: mean(value_BT.detach()) for name, value_BT in metrics.items()}
        if c.grpo_loss == "dr_grpo":
            divisor_BT = torch.full_like(divisor_BT, c.answer_tokens)
        return LossSum(mean(loss_BT), sums)


def objective_of(run: Run, reference: Optional[Callable[..., Tensor]], _) -> GRPO:
    """Return the objective of a run."""
    return GRPO(run.config, Rollouts.of(run), reference)


@collective
def validation_reward(run: Run) -> Result:
    """Return the mean reward of greedy answers to the first held-out prompts."""
    config, ranks, rollouts = run.config, run.ranks, run.objective.rollouts
    held_out = run.inputs.validation_rows
    rows, size = min(config.validation_rows, len(held_out)), config.micro_batch_size
    batches = [np.arange(first, min(first + size, rows)) for first in range(0, rows, size)]
    answers, rounds = [], -(-len(batches) // ranks.world_size)
    for number in run.context.progress(range(rounds), rounds, "Reward"):
        for indices in batches[number * ranks.world_size + ranks.rank:][:1]:
            prompts = held_out(indices)
            written = rollouts.generate(prompt_ids(prompts), 1)
            answers += zip(indices.tolist(), rollouts.reward(prompts, written))
    gathered = dict(pair for pairs in ranks.all_gather_json(answers) for pair in pairs)
    every = [Answer(*gathered[row]) for row in range(rows)]
    rollouts.check_any(every, "validation")
    rewards_N = np.array([answer.reward for answer in every if not answer.failure])
    reward, error = float(rewards_N.mean()), standard_error(rewards_N)
    metrics = {"val_reward": reward, "val_reward_stderr": error}
    unread = rollouts.count_misunderstood(every, "validation")
    metrics |= {f"val_{name}": share for name, share in unread.items()}
    texts = [{"prompt": each.prompt, "answer": each.text, "reward": each.reward} for each in every]
    items = json_sha256([run.inputs.validation_rows.fingerprint, rows, config.reward, config.answer_tokens])
    line = {"name": schema.REWARD, "items": items, "kind": "prompts", "n": len(every),
            "texts": texts[:RECORDED_TEXTS]}
    if len(rewards_N) == rows:
        line["reward"] = rewards_N.tolist()
    summary = f"Reward: {number_text(reward, error)} | N: {len(rewards_N)}"
    return Result(metrics, line, summary, [Row("validation", "reward", reward, error, None, len(rewards_N))])


@collective
def take_updates(run: Run, reducer: Reducer, batches: list[Batch], count: int, lr: float) -> StepResult:
    """Make several updates on a step's batches, up to the first that is not finite.

    `run.undo` restores the state before them. The result has means, and the largest spike.
    """
    run.undo, restore = None, copy_state(run)
    updates = [train.take_step(run, reducer, batches, count, lr)]
    while updates[-1].finite and len(updates) < run.config.grpo_updates:
        run.undo = restore
        updates.append(train.take_step(run, reducer, batches, count, lr))

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(updates)

    metrics = {name: mean(each.metrics[name] for each in updates) for name in updates[0].metrics}
    return updates[-1]._replace(
        loss=mean(each.loss for each in updates), metrics=metrics, spike=max(each.spike for each in updates),
        grad_norm=mean(each.grad_norm for each in updates), finite=updates[-1].finite,
        updated=updates[-1].finite and any(each.updated for each in updates),
        stop=any(each.stop for each in updates))


def copy_state(run: Run) -> Callable[[], None]:
    """Copy the trained state into host memory; return a function that restores it."""
    def tensors() -> dict[str, Tensor]:
        trained = {name: each for name, each in run.model.named_parameters() if each.requires_grad}
        return trained | run.optimizer.state_tensors()

    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors().items()}
    exponent = run.progress.gradient_exponent

    @torch.no_grad()
    def restore() -> None:
        for name, tensor in tensors().items():
            tensor.copy_(copies.get(name, tensor))
        if len(copies) < len(tensors()):  # before the first update, the optimizer has no state
            for optimizer in run.optimizer.optimizers:
                optimizer.state.clear()
        run.progress.gradient_exponent = exponent

    return restore


VALIDATIONS["grpo"] = "Reward", "val_reward", validation_reward
