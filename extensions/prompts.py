"""The prompts that online training answers, as rows."""

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from common.errors import DataError
from common.text import counted
from data_pipeline.examples import ExampleSet
from dataloaders import OPENERS, Batch, SourceRows, permute
from model_kernels.head import IGNORE_INDEX


class PromptRows(SourceRows):
    """The prompts of an example set, one per row; calling it with indices returns a `Batch` without targets.

    A batch's `stored` has `prompt_B1`, the tokens of each prompt, and `record_BR`, its record as JSON in
    ASCII, padded with zeros. A fixed permutation orders the prompts, as in `ExampleRows`. Prompts that leave
    no room for `answer_tokens` in a row are left out.
    """

    def __init__(self, example_set: ExampleSet, row_tokens: int, answer_tokens: int):
        self.example_set, self.row_tokens = example_set, row_tokens
        self.token_set, self.fingerprint = example_set.tokens, example_set.fingerprint
        # The last token of an answer is only a target.
        used = np.flatnonzero(example_set.first_targets <= row_tokens + 1 - answer_tokens)
        if not len(used):
            shortest = example_set.first_targets.min()
            raise DataError(f"{example_set.path}: the shortest prompt has {shortest:,} tokens, too many "
                            f"for MAX_SEQ_LEN={row_tokens} with answers of {answer_tokens}; raise it, or "
                            "lower GRPO_MAX_TOKENS")
        self._examples = used[permute(np.arange(len(used)), len(used), 0, 0)]
        self.truncated, self.left_out = 0, len(example_set) - len(used)
        self.content = counted(len(self), "prompt")
        self.fill = float(example_set.first_targets[used].mean()) / row_tokens

    def __len__(self) -> int:
        return len(self._examples)

    def describe(self) -> str:
        left_out = f", {self.left_out:,} too long and left out" if self.left_out else ""
        return f"{self.content}{left_out}"

    def examples_in(self, row: int) -> np.ndarray:
        return self._examples[row:row + 1]

    def __call__(self, indices: np.ndarray) -> Batch:
        tokens_BT = torch.zeros(len(indices), self.row_tokens, dtype=torch.int64)
        lengths, records = [], []
        for row, example in enumerate(self._examples[indices].tolist()):
            ids, length = self.example_set.read(example)[0], int(self.example_set.first_targets[example])
            tokens_BT[row, :length] = torch.from_numpy(ids[:length].astype(np.int64))
            lengths.append([length])
            records.append(torch.from_numpy(ids[length:].astype(np.int64)))
        stored = {"prompt_B1": torch.tensor(lengths), "record_BR": pad_sequence(records, batch_first=True)}
        return Batch(tokens_BT, torch.full_like(tokens_BT, IGNORE_INDEX), stored=stored)


OPENERS["prompts"] = lambda example_set, config: PromptRows(
    example_set, config.max_seq_len, config.answer_tokens)
