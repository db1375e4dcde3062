"""The notebook of the examples prints what it shows. Run this file to write what it prints now into the notebook."""

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "find_faults.ipynb"
NUMBER = r"-?\d+\.\d+"


def run(notebook: Any) -> list[tuple[dict[str, Any], str]]:
    """Run the code cells in order: each cell, and what it prints."""
    scope: dict[str, Any] = {}
    printed = []
    for number, cell in enumerate((x for x in notebook["cells"] if x["cell_type"] == "code"), 1):
        assert cell["execution_count"] == number, "run all cells in order, then save"
        with redirect_stdout(StringIO()) as text:
            exec(compile("".join(cell["source"]), f"Cell In[{number}]", "exec"), scope)
        printed.append((cell, text.getvalue()))
    return printed


def shown(cell: dict[str, Any]) -> str:
    """The output of a cell that is in the notebook."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def test_the_notebook_prints_what_it_shows():
    """A reader who runs the notebook would see something else: a fault that is not found, or another error."""
    for cell, text in run(json.loads(NOTEBOOK.read_text())):
        assert re.sub(NUMBER, "#", text) == re.sub(NUMBER, "#", shown(cell)), cell["source"]
        numbers, expected = ([float(x) for x in re.findall(NUMBER, words)] for words in (text, shown(cell)))
        assert numbers == pytest.approx(expected, abs=2e-3)  # another processor rounds otherwise


def test_the_notebook_shows_its_faults():
    """The outputs would be kept without what the text beside them says: the race would not show in the loss."""
    outputs = [shown(x) for x in json.loads(NOTEBOOK.read_text())["cells"] if x["cell_type"] == "code"]
    losses = [{re.findall(NUMBER, line)[0] for line in text.splitlines()} for text in outputs if "Slow" in text]
    assert [len(values) for values in losses] == [3, 1], "batches of a queue, and by the number of the rank"
    whole = " ".join(outputs)
    for words in ("under way when what it sends was written to", "ranks called different collectives", "rank 1 died"):
        assert words in whole


if __name__ == "__main__":
    notebook = json.loads(NOTEBOOK.read_text())
    for cell, text in run(notebook):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["outputs"] = [stream] if text else []
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
