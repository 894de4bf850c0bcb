"""A small file in SQuAD format, for tests that ask questions of several documents."""

from __future__ import annotations

import json
from pathlib import Path

from pipelines.measure.cases import FILE

TOWNS = ("Arden", "Borrow", "Calder", "Dunmore")
TRADES = ("salt", "wool", "slate")


def article(number: int, town: str) -> dict[str, object]:
    """Three paragraphs with two questions each; the answer of the second stands twice, and the first place is gold."""
    paragraphs = []
    for place, trade in enumerate(TRADES):
        year, ships = str(1700 + 10 * number + place), str(20 + 7 * number + place)
        context = (
            f"The {trade} market of {town} was opened in {year} beside the old bridge. In its best summer {ships} "
            f"ships carried {trade} down the river. A picture of the {ships} ships hangs in the town hall."
        )
        asked = [(f"When was the {trade} market of {town} opened?", year), (f"How many ships carried {trade}?", ships)]
        qas = [
            {
                "id": f"{town}-{place}-{turn}",
                "question": question,
                "answers": [{"text": answer, "answer_start": context.index(answer)}],
            }
            for turn, (question, answer) in enumerate(asked)
        ]
        paragraphs.append({"context": context, "qas": qas})
    return {"title": town, "paragraphs": paragraphs}


def write_squad(folder: Path) -> Path:
    """The articles of all towns as the file that is looked for in `folder`."""
    squad = {"version": "1", "data": [article(number, town) for number, town in enumerate(TOWNS)]}
    (folder / FILE).write_text(json.dumps(squad), encoding="utf-8")
    return folder
