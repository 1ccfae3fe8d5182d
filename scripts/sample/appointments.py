"""Write the records of docs/tutorials/fine-tune.md: appointments as people write them, and as JSON.

    python scripts/sample/appointments.py data/appointments

The folder gets train.jsonl, test.jsonl and five-examples.jsonl. No sentence of the test is in the training
records. five-examples.jsonl has the test's sentences, each after the same five examples, to measure the model
without training.
"""

import argparse
import json
import random
from datetime import date, timedelta
from pathlib import Path

PEOPLE = ("Anna", "Ben", "Carla", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kemal",
          "Lena", "Marta", "Nils", "Olga", "Pavel")
TITLES = ("dentist", "lunch with {}", "call with {}", "team meeting", "piano lesson", "haircut",
          "car service", "interview with {}", "yoga class", "code review with {}", "coffee with {}",
          "eye test", "flat viewing", "dinner at {}'s place", "budget review", "physiotherapy")
MINUTES = {15: ("15 minutes", "a quarter of an hour"), 30: ("30 minutes", "half an hour"),
           45: ("45 minutes",), 60: ("an hour", "60 minutes"), 90: ("an hour and a half", "90 minutes"),
           120: ("two hours", "2 hours")}
HOURS = ("twelve", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
SENTENCES = ("{title} on {day} at {time}, {length}", "Please book {title} for {day}, {time}, for {length}.",
             "Put {title} in my calendar: {day} at {time}. It takes {length}.",
             "on {day} at {time} I have {title} ({length})", "{time}, {day}: {title}, about {length}",
             "Can you add {title}? {day}, {time}, should last {length}.")


def spoken_day(day: date, draw: random.Random) -> str:
    is_th = day.day in (11, 12, 13)
    ending = "th" if is_th else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    return draw.choice((
        f"{day.day} {day:%B %Y}", f"{day:%B} {day.day}, {day.year}", f"{day:%d.%m.%Y}",
        f"the {day.day}{ending} of {day:%B %Y}", f"{day:%A}, {day.day} {day:%b %Y}"))


def spoken_time(hour: int, minute: int, draw: random.Random) -> str:
    of_day = "in the morning" if hour < 12 else "in the afternoon" if hour < 18 else "in the evening"
    name = HOURS[hour % 12]
    spoken = {0: f"{name} o'clock", 15: f"a quarter past {name}", 30: f"half past {name}"}[minute]
    short = f"{(hour - 1) % 12 + 1}" + f":{minute:02}" * (minute > 0)
    half = "am" if hour < 12 else "pm"
    return draw.choice((f"{hour:02}:{minute:02}", f"{short} {half}", f"{spoken} {of_day}"))


def record(draw: random.Random) -> tuple[str, str]:
    """Draw an appointment; return its sentence and its JSON."""
    day = date(2026, 1, 1) + timedelta(draw.randrange(730))
    hour, minute = draw.randrange(8, 20), draw.choice((0, 15, 30))
    minutes = draw.choice(list(MINUTES))
    title = draw.choice(TITLES).format(draw.choice(PEOPLE))
    sentence = draw.choice(SENTENCES).format(title=title, day=spoken_day(day, draw), length=draw.choice(
        MINUTES[minutes]), time=spoken_time(hour, minute, draw))
    return sentence, json.dumps({"title": title, "date": f"{day}", "time": f"{hour:02}:{minute:02}",
                                 "minutes": minutes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for the files")
    parser.add_argument("--train", type=int, default=1000, help="number of training records")
    parser.add_argument("--test", type=int, default=200, help="number of test records")
    args = parser.parse_args()
    draw, records = random.Random(0), {}
    while len(records) < args.train + args.test:
        records.setdefault(*record(draw))
    messages = [[{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
                for text, answer in records.items()]
    train, test = messages[:args.train], messages[args.train:]
    examples = sum(train[:5], [])
    args.output.mkdir(parents=True, exist_ok=True)
    for name, chats in (("train", train), ("test", test)):
        lines = [json.dumps({"messages": chat}) for chat in chats]
        (args.output / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines = [json.dumps({"prompt": examples + chat[:1], "completion": chat[1:]}) for chat in test]
    (args.output / "five-examples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"Wrote {len(train)} records to train on and {len(test)} to test with into {args.output}")


if __name__ == "__main__":
    main()
