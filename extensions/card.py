"""The model card of each checkpoint."""

from checkpoint.manifest import CARD
from run.card import run_card
from run.extensions import Extension
from run.life import Run


class Card(Extension):
    """Writes README.md into each checkpoint."""

    def checkpoint_texts(self, run: Run) -> dict[str, str]:
        try:
            return {CARD: run_card(run)} if run.ranks.is_rank0 else {}
        except Exception as error:  # of any kind: a card must not prevent saving weights
            run.log.warn(f"the checkpoint has no model card: {type(error).__name__}: {error}")
            return {}


EXTENSION = Card
