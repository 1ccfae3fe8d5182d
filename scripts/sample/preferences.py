"""Write pairs whose request decides which answer is better: three words in a row, or in a column.

    python scripts/sample/preferences.py data/layouts

The folder gets pairs, rated answers (for KTO) and prompts (for GRPO), each to train on and to test with. Both
answers to a request have the same words, and half of the requests ask for a row: a model that always
prefers one layout, or the longer answer, is right in half of the pairs. No word of the test is in the
training records.

`REWARD=scripts.sample.preferences:words` rewards answers for the words of the request.
"""

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

WORDS = """
    apples bananas beans beef beer berries bread butter cabbage candles carrots cereal cheese
    cherries chicken chocolate coffee cookies corn cream cucumbers dates eggs figs fish flour garlic
    glue grapes ham honey ice jam juice ketchup kiwis lamb leeks lemons lettuce limes mangoes
    matches milk mushrooms mustard noodles nuts oats oil olives onions oranges paper pasta peaches
    peanuts pears peas pepper pizza plums pork potatoes pumpkin radishes raisins rice rolls salad
    salmon salt sauce sausages shampoo shrimp soap soup spinach sponges steak strawberries sugar
    syrup tea tissues toast tofu tomatoes tuna turkey turnips vanilla vinegar walnuts water wine
    wraps yeast yogurt
    """.split()
LAYOUTS = {"row": ", ", "column": "\n"}


def words(prompt: str, answer: str, record: dict[str, Any]) -> float:
    """Return the share of the requested words that are in the answer."""
    requested = re.findall(r"\w+", record["answer"])
    return sum(word in answer.lower() for word in requested) / len(requested)


words.columns = ("answer",)


def pairs(known: list[str], count: int, draw: random.Random) -> list[dict[str, str]]:
    """Return pairs with different words, which ask for a column and for a row in turn."""
    seen, records = set(), []
    while len(records) < count:
        three = draw.sample(known, 3)
        if frozenset(three) in seen:
            continue
        seen.add(frozenset(three))
        asked, other = LAYOUTS if len(records) % 2 else reversed(LAYOUTS)
        records.append({
            "system": "Be brief.", "prompt": f"Write {three[0]}, {three[1]} and {three[2]} in a {asked}.",
            "chosen": LAYOUTS[asked].join(three), "rejected": LAYOUTS[other].join(three)})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for the files")
    parser.add_argument("--train", type=int, default=80, help="number of training pairs")
    parser.add_argument("--test", type=int, default=80, help="number of test pairs")
    args = parser.parse_args()
    if not 1 <= min(args.train, args.test) <= max(args.train, args.test) <= 10_000:
        parser.error("--train and --test: use 1 to 10,000 pairs; there are few more of these words")
    draw = random.Random(0)
    known = draw.sample(WORDS, len(WORDS))
    half = len(known) // 2
    args.output.mkdir(parents=True, exist_ok=True)
    for split, part, count in (("train", known[:half], args.train), ("test", known[half:], args.test)):
        files = {"pairs": pairs(part, count, draw), "rated": [], "prompts": []}
        for pair in files["pairs"]:
            request = {"system": pair["system"], "prompt": pair["prompt"]}
            files["rated"] += [{**request, "completion": pair["chosen"], "label": True},
                               {**request, "completion": pair["rejected"], "label": False}]
            files["prompts"].append({**request, "answer": pair["chosen"]})
        for name, records in files.items():
            text = "".join(json.dumps(record) + "\n" for record in records)
            (args.output / f"{name}-{split}.jsonl").write_text(text, encoding="utf-8")
    print(f"Wrote {args.train} pairs to train on and {args.test} to test with into {args.output}")


if __name__ == "__main__":
    main()
