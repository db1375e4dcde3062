"""What a step asks of a GPU, counted from a log: host waits, copies, memory, collectives."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from races import Line, lines

COLUMNS = ("host waits", "stream waits", "copies", "pageable copies", "cudaMallocs", "collectives", "messages")
BESIDE = ("gathers beside", "sums beside")  # the computation; races.py knows what waits for what


def counted(line: Line) -> list[str]:
    """The names of the columns in which a line of the log counts."""
    says = line.says
    if line.word == "copy":
        return ["copies"] * ("blocking" not in says) + ["pageable copies"] * ("pageable" in says.values())
    if line.word == "nccl":
        return ["messages" if says["kind"] in ("send", "receive") else "collectives", says["kind"]]
    names = {"sync": "host waits", "wait": "stream waits", "malloc": "cudaMallocs", "pinned": "cudaMallocs"}
    return [names[line.word]] if line.word in names else []


def counts_of(path: str | Path) -> dict[str, Counter[str]]:
    """The counts of the last step of each case of a log: from its line `step` to its line `peak`."""
    result, name, inside = dict[str, Counter[str]](), "", False
    for line in lines(path):
        if line.word == "case":
            name, inside = line.says["name"], False
        elif line.word in ("step", "peak"):
            inside = line.word == "step"
            result[name] = Counter() if inside else result[name]
        elif inside:
            result[name].update(counted(line))
    return result


if __name__ == "__main__":
    for case, counts in counts_of(sys.argv[1]).items():
        print(case, dict(counts))
