"""Each room has a budget of lines, so that growth is a decision: a change that needs more raises it here.

    python tests/house/test_budgets.py     print the table with today's lines, rounded up
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The goals of chapters and packages, of scripts and of tests are 16,000, 6,000 and 26,000.
ALL_CODE, ALL_SCRIPTS, ALL_TESTS = 25_930, 8_330, 31_160
BUDGETS = {
    "config.py": 850,
    "data_preparation_utils.py": 300,
    "dataloaders.py": 690,
    "hellaswag_utils.py": 240,
    "lora.py": 290,
    "model.py": 370,
    "model_utils.py": 410,
    "tokenizer.py": 510,
    "train.py": 320,
    "checkpoint/": 2120,
    "common/": 1050,
    "data_pipeline/": 3140,
    "debug/": 1040,
    "evaluation/": 490,
    "fused/": 970,
    "inference/": 940,
    "learn/": 2190,
    "observe/": 2230,
    "parallel/": 1430,
    "report/": 1320,
    "run/": 3160,
    "scripts/": 8330,
    "serving/": 1000,
    "settings/": 870,
    "tests/": 31160,
}


def lines_by_room() -> dict[str, int]:
    """The lines of each chapter and package, comments and docstrings included; and of scripts and tests."""
    rooms = {path.name: [path] for path in sorted(ROOT.glob("*.py"))}
    rooms |= {f"{path.parent.name}/": [*path.parent.rglob("*.py")] for path in sorted(ROOT.glob("*/__init__.py"))}
    rooms["scripts/"] = [path for path in (ROOT / "scripts").rglob("*") if path.suffix in (".py", ".sh")]
    rooms["tests/"] = [*(ROOT / "tests").rglob("*.py")]
    return {room: sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) for room, files in rooms.items()}


def test_every_room_keeps_to_its_budget():
    lines = lines_by_room()
    assert {room: found for room, found in lines.items() if found > BUDGETS.get(room, 0)} == {}, "more lines than budgeted"
    assert set(BUDGETS) == set(lines), "a room is gone"


def test_the_budgets_keep_to_the_whole():
    code = sum(budget for room, budget in BUDGETS.items() if room not in ("scripts/", "tests/"))
    assert code <= ALL_CODE and BUDGETS["scripts/"] <= ALL_SCRIPTS and BUDGETS["tests/"] <= ALL_TESTS


if __name__ == "__main__":
    for room, found in lines_by_room().items():
        print(f'    "{room}": {-(-found // 10) * 10},')
