"""Examine the rows of a step one by one: which is not finite or hard, at which token, and the text around it.

Shape suffixes: B rows, T tokens, D model.
"""

import copy
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from common.text import printable
from data_pipeline.batch import Batch
from data_pipeline.mixed_rows import MixedRows, map_parts
from dataloaders import Rows, TokenRows
from fused.chunked_head import IGNORE_INDEX
from model_utils import gradient_norm, is_vocabulary
from training.diagnostics import count_bad, describe_tensors
from training.state import Run

ROOT = Path(__file__).resolve().parents[1]
CONTEXT_TOKENS = 24  # to show before and after a token


def bad_tokens(values: Tensor) -> list[int]:
    """Return the tokens of a (1, T, D) tensor at which it is not finite."""
    if values.ndim <= 2:
        return []
    return (~values[0].isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist()


class FirstBad:
    """Watches a model that reads one row for values that are not finite.

    `module` is the first with such an output, `gradient` the first such gradient of the backward. `token` is
    the first token with such an output, as later ones attend to it; or else the last one whose embedding gets
    such a gradient, as gradients flow to earlier tokens.
    """

    def __init__(self, model: nn.Module):
        self.clear()
        self.handles = [module.register_forward_hook(self._watch_output(name or "the head"))
                        for name, module in model.named_modules()]
        self.handles += [parameter.register_post_accumulate_grad_hook(self._watch_gradient(name))
                         for name, parameter in model.named_parameters() if parameter.requires_grad]

    def clear(self) -> None:
        """Start anew, for another row."""
        self.module: Optional[str] = None
        self.gradient: Optional[str] = None
        self.token: Optional[int] = None

    def _watch_output(self, name: str):
        def hook(module, inputs, output):
            if self.module is None and isinstance(output, Tensor) and count_bad(output):
                self.module = name
                self.token = next(iter(bad_tokens(output)), None)
            if name == "tok_embeddings" and isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self._watch_embeddings)
        return hook

    def _watch_embeddings(self, gradient_BTD: Tensor) -> None:
        if self.token is None and (tokens := bad_tokens(gradient_BTD)):
            self.token = tokens[-1]

    def _watch_gradient(self, name: str):
        def hook(parameter):
            if self.gradient is None and count_bad(parameter.grad):
                self.gradient = name
        return hook

    def __enter__(self) -> "FirstBad":
        return self

    def __exit__(self, *_) -> None:
        for handle in self.handles:
            handle.remove()


class RowReport(NamedTuple):
    """A row by itself, with the weights from before the step."""

    row: int
    loss: float  # mean over the units that the objective counts; NaN if there are none
    grad_norm: float  # of its part of the step's gradient
    bad_module: Optional[str]  # these three as in FirstBad
    bad_gradient: Optional[str]
    bad_token: Optional[int]

    @property
    def is_bad(self) -> bool:
        """Whether the row has an output or a gradient that is not finite."""
        return self.bad_module is not None or self.bad_gradient is not None


def backward_of_row(run: Run, row: int, count: int) -> tuple[float, float, int]:
    """Return a row's summed loss, the norm of its part of the step's gradient, and its count.

    Args:
        count: the units of the whole step.
    """
    batch = run.inputs.rows(np.array([row])).to(run.ranks.device)
    scale = run.scaler.get_scale() if run.scaler else 1.0
    run.optimizer.zero_grad()
    total, _ = run.objective.loss_sum(run.model, batch)
    (total * (scale / count)).backward()
    return float(total.detach()), float(gradient_norm(run.model)) / scale, int(run.objective.count(batch))


def examine_rows(run: Run, rows: Sequence[int], count: int) -> list[RowReport]:
    """Return a report of each row, without dropout: first those not finite, then the highest losses."""
    reports = []
    run.model.eval()
    with FirstBad(run.model) as first_bad:
        for row in tqdm(rows, desc="Row by row", unit="row", delay=2, leave=False, disable=None):
            first_bad.clear()
            total, norm, own = backward_of_row(run, row, count)
            reports.append(RowReport(row, total / own if own else math.nan, norm,
                                     first_bad.module, first_bad.gradient, first_bad.token))

    def order(report: RowReport) -> tuple[bool, float]:
        return not report.is_bad, 0 if math.isnan(report.loss) else -report.loss

    return sorted(reports, key=order)


def first_bad_operation(run: Run, row: int, count: int) -> Optional[str]:
    """Return the first operation with a NaN gradient, and our line that called it, as autograd detects it."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.autograd.detect_anomaly():
                backward_of_row(run, row, count)
    except RuntimeError as error:
        found = re.search(r"Function '(\w+)' returned nan", str(error))
        if not found:
            raise
        trace = "\n".join(str(entry.message) for entry in caught)
        ours = [f"{Path(name).relative_to(ROOT)}:{line} in {function}"
                for name, line, function in re.findall(r'File "(.*?\.py)", line (\d+), in (\w+)', trace)
                if Path(name).is_relative_to(ROOT) and "site-packages" not in name]
        return f"{found[1]}{f', called by {ours[-1]}' if ours else ''}"
    return None


@torch.no_grad()
def losses_by_token(run: Run, row: int) -> tuple[Batch, Tensor]:
    """Return the row, and the (T,) cross-entropy of its targets in nats; NaN without a target."""
    batch = run.inputs.rows(np.array([row])).to(run.ranks.device)
    logprob_BT = run.model.eval()(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT,
                                  target_index_M=batch.target_index_M)
    return batch, torch.where(batch.targets_BT == IGNORE_INDEX, torch.nan, -logprob_BT.float())[0].cpu()


# ---------------------------------------------------------------------------------- documents and text


def numbered(rows) -> Rows:
    """Return the rows with document ids, whatever DOCUMENT_MASK says, and without stored outputs."""
    if isinstance(rows, MixedRows):
        return map_parts(rows, lambda part, source: numbered(part))
    while hasattr(rows, "rows"):
        rows = rows.rows
    if isinstance(rows, TokenRows):
        return replace(rows, document_start_id=rows.token_set.document_start_id)
    rows = copy.copy(rows)
    rows.numbered = True
    return rows


def place_of(rows: Rows, row: int, token: int, document: int) -> str:
    """Return the file and the place of a document in it.

    Args:
        token: the index of its first token in the row.
        document: its id in the row, from 1.
    """
    if isinstance(rows, MixedRows):
        (source,), (row,) = rows.locate(np.array([row]))
        rows = rows.parts[source]
    if not isinstance(rows, TokenRows):
        examples = rows.examples_in(row).tolist()
        index = (document - 1) // (2 if rows.example_set.kind == "pairs" else 1)
        return f"example {examples[index]:,} of {rows.example_set.path} ({rows.example_set.kind})"
    offset = row * rows.row_tokens + token
    for shard in rows.token_set.shards:
        if offset < shard.tokens:
            return f"{shard.path}, token {offset:,}"
        offset -= shard.tokens
    raise AssertionError("the row is beyond the last shard")


def excerpt(tokenizer, ids: Sequence[int], marked: int) -> str:
    """Return the text around a token, which is marked as >>token<<."""
    first, last = max(0, marked - CONTEXT_TOKENS), marked + 1 + CONTEXT_TOKENS
    before, token, after = (tokenizer.decode(part) for part in (
        ids[first:marked], ids[marked:marked + 1], ids[marked + 1:last]))
    text = f"{before.lstrip(' ')}>>{token}<<{after}"
    return printable(f"{'... ' if first else ''}{text}{' ...' if last < len(ids) else ''}")


def worst_document(bare: Rows, report: RowReport, loss_T: Tensor) -> tuple[str, int, slice]:
    """Return a row's worst document: its file and place, its worst token, and its slice of the row.

    It is the document of the first bad token, or the one with the most loss above the row's median.
    """
    document_ids_BT = bare(np.array([report.row])).document_ids_BT
    document_T = torch.ones_like(loss_T, dtype=torch.int32) if document_ids_BT is None else document_ids_BT[0]
    worst = report.bad_token
    if worst is None:
        largest = torch.finfo(torch.float32).max
        excess_T = (loss_T - loss_T.nanmedian()).nan_to_num(0, posinf=largest).clamp(min=0)
        sums = torch.zeros(int(document_T.max()) + 1).scatter_add(0, document_T.long(), excess_T)
        worst = int(torch.where(document_T == int(sums.argmax()), excess_T, -1).argmax())
    inside = (document_T == document_T[worst]).nonzero().flatten()
    within = slice(int(inside[0]), int(inside[-1]) + 1)
    return place_of(bare, report.row, within.start, int(document_T[worst])), worst, within


def describe_row(run: Run, bare: Rows, report: RowReport, count: int) -> list[str]:
    """Return the lines of a row's report: its loss, its worst document, the text around its worst token."""
    tokenizer = run.inputs.tokenizer
    batch, loss_T = losses_by_token(run, report.row)
    place, worst, within = worst_document(bare, report, loss_T)
    ids = [*batch.tokens_BT[0].tolist(), int(batch.targets_BT[0, -1])]
    own_loss = float(loss_T[within].nanmean())
    lines = [f"Row {report.row}: loss {report.loss:.4f}, gradient norm of its part {report.grad_norm:.4f}",
             f"  document: {place}",
             f"  {within.stop - within.start} of its tokens are in this row, mean loss {own_loss:.4f}"]
    if report.is_bad:
        marked = worst
        if report.bad_module:
            lines.append(f"  first non-finite output: {report.bad_module}")
        elif operation := first_bad_operation(run, report.row, count):
            lines.append(f"  first NaN in a gradient: from {operation}")
        lines.append(f"  first non-finite gradient: {report.bad_gradient}")
        if report.bad_token is not None:
            lines.append(f"  token: {worst} of the row, {tokenizer.decode(ids[worst:worst + 1])!r}")
    else:
        marked = worst + 1  # the target of the hardest token
        losses = [(loss, token) for token, loss in enumerate(loss_T.tolist())
                  if not math.isnan(loss) and within.start <= token < within.stop]
        hardest = [f"{tokenizer.decode([ids[token + 1]])!r} {loss:.2f}"
                   for loss, token in sorted(losses)[:-6:-1]]
        lines.append(f"  hardest targets: {', '.join(hardest)}")
    end = min(within.stop + 1, len(ids)) if marked >= within.stop else within.stop
    return [*lines, f"  text: {excerpt(tokenizer, ids[within.start:end], marked - within.start)}"]


def describe_parameters(run: Run) -> list[str]:
    """Return a line for each parameter that is not finite, with the token whose row it is."""
    lines = []
    for entry in describe_tensors(run.model):
        if entry["kind"] == "parameter":
            parameter = dict(run.model.named_parameters())[entry["tensor"]]
            first = (~parameter.isfinite()).nonzero()[0].tolist()
            token = ""
            if is_vocabulary(entry["tensor"]):
                token = f" (token {run.inputs.tokenizer.decode(first[:1])!r})"
            lines.append(f"Parameter {entry['tensor']} {tuple(entry['shape'])}: {entry['non_finite']} "
                         f"non-finite elements, the first at {first}{token}")
    return lines
