"""How generated answers compare with reference answers: exact match, ROUGE-L and BLEU."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from checkpoint.item_scores import standard_error
from common.errors import requires_package


class TextScores(NamedTuple):
    """The scores of N answers."""

    exact_N: np.ndarray  # bool: equal but for white space at the ends
    rouge_l_N: np.ndarray  # the F-measure of the longest common subsequence of words, 0 to 1
    bleu: float  # of all answers together, 0 to 1

    def metrics(self) -> dict[str, float]:
        """Return what is logged; BLEU is no mean over answers, so it has no standard error."""
        values = {"n": len(self.exact_N), "exact_match": float(self.exact_N.mean()),
                  "exact_match_stderr": standard_error(self.exact_N.astype(float)),
                  "rouge_l": float(self.rouge_l_N.mean()), "rouge_l_stderr": standard_error(self.rouge_l_N),
                  "bleu": self.bleu}
        return {f"generation_{name}": value for name, value in values.items()}


def import_scorers() -> tuple[Callable, Callable]:
    """Return the classes `RougeScorer` and `corpus_bleu`. Raises SettingsError if a package is missing."""
    with requires_package("rouge-score", "GENERATION_EVAL_EVERY"):
        from rouge_score.rouge_scorer import RougeScorer
    with requires_package("sacrebleu", "GENERATION_EVAL_EVERY"):
        from sacrebleu import corpus_bleu
    return RougeScorer, corpus_bleu


def score_texts(answers: Sequence[str], references: Sequence[str]) -> TextScores:
    """Return the scores of answers by rouge-score and sacrebleu with their defaults, one reference each.

    ROUGE-L compares lower-case Latin letters and digits only, so in other scripts it is 0.
    Source: Lin 2004 (ROUGE); Papineni et al. 2002 (BLEU), as in Post 2018 (arXiv:1804.08771).
    """
    rouge_scorer, corpus_bleu = import_scorers()
    rouge = rouge_scorer(["rougeL"])
    exact_N = np.array([answer.strip() == wanted.strip() for answer, wanted in zip(answers, references)])
    rouge_l_N = np.array([rouge.score(wanted, answer)["rougeL"].fmeasure
                          for answer, wanted in zip(answers, references)])
    return TextScores(exact_N, rouge_l_N, corpus_bleu(answers, [references]).score / 100)
