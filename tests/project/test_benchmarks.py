"""The benchmarks run, what they compare computes the same, and what they say is what was measured."""

import dataclasses
import datetime
import os
import re
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.benchmarks import BENCHMARKS, benchmarks  # noqa: F401  # a fixture
from support.worlds import gloo, simulated

ROOT = Path(__file__).parents[2]


def losses(mesh: Any, modules: Any) -> list[torch.Tensor]:
    """The loss of every system for the whole batch: the ranks have the same tokens."""
    systems = [make for name, make in modules.ALL.items() if name != "FSDP2"]  # it takes processes
    batch = modules.batch_of("tiny", 0)
    passes = [make("tiny", mesh, step) for make in systems for step in (False, True)]
    return [run(batch) for run in passes]


@pytest.mark.usefixtures("benchmarks")
def test_modules() -> None:
    """Systems of `make bench-modules` that compute different losses, or fail, would make its ratios meaningless."""
    import modules

    for rank in simulated(losses, modules, shard=2):
        torch.testing.assert_close(torch.stack(rank), rank[0].expand(len(rank)))


EAGER = ["fsdp2", "local", "fsdp1", "simple", "ddp", "ddp-zero", "fshard", "fshard-whole", "fshard-zero1"]
EAGER += ["fshard-tree", "fshard-parts"]
# compiling takes 3 to 9 s of processor time each: all on all models with FSHARD_ALL=1, else each on some
COMPILED = {
    "wide": [],
    "conv": ["jax"],
    "S": ["jax"],
    "M": ["fsdp2-compiled", "simple-compiled"],
    "T": ["fshard-buckets", "fshard-artifact"],
    "experts": ["jax"],
    "gpt2": ["fshard-jit"],
}


def trained(mesh: Any, model: str, systems: list[str]) -> dict[str, list[float]]:
    """Times of two rounds of a tiny model; an error if the losses of the systems, and FSDP2's, differ."""
    sys.path.insert(0, BENCHMARKS)
    warnings.simplefilter("default")  # what other systems warn of
    import measure
    from models import task_of
    from systems import SYSTEMS

    for broken in ("ddp", "fshard"):
        with pytest.raises(RuntimeError, match="do not train alike"):
            measure.check_losses({"fsdp2": 1.0, "ddp": 1.0, "fshard": 1.0} | {broken: 1.01}, 1e-3)
    on_jax = [0.5, float("nan")][mesh.get_rank()]  # rank 0 has the process
    measure.check_losses({"fsdp2": float(mesh.get_rank()), "jax": on_jax, "local": 7.0}, 1e-5)
    kept = [name for name in systems if model not in SYSTEMS[name].without]
    return measure.step_times(task_of(model, tiny=True), kept, mesh, rounds=2, warmup=1)


def without_ranks(mesh: Any, rate: float) -> None:
    """Steps in which one system trains each rank for itself, or with another rate."""
    sys.path.insert(0, BENCHMARKS)
    warnings.simplefilter("default")
    import measure
    import systems
    from models import task_of

    def wrong(task: Any, mesh: Any) -> Any:
        model = task.module()
        model = model if rate == systems.LR else systems.DistributedDataParallel(model)
        return systems._stepped(model, torch.optim.AdamW(model.parameters(), lr=rate, fused=True))

    systems.SYSTEMS["ddp"] = systems.System(wrong, "wrong")
    measure.step_times(task_of("S", tiny=True), ["fsdp2", "ddp"], mesh, rounds=2, warmup=0)


@pytest.mark.parametrize("rate", [1e-3, 0.9e-3])
def test_a_system_that_trains_otherwise_is_noticed(rate: float) -> None:
    """A system that does not communicate, or has another rate of learning, ends the run in its second step: otherwise
    one that does less would win."""
    with pytest.raises(RuntimeError, match="do not train alike"):
        gloo(without_ranks, rate)


@pytest.mark.parametrize("model", COMPILED)
def test_systems_train_alike(model: str) -> None:
    """Every system of `make bench` takes the steps of FSDP2 on every model, with other data on each rank: otherwise
    its ratios would compare different things."""
    everything = {name for names in COMPILED.values() for name in names}
    systems = [*EAGER, *(sorted(everything) if os.environ.get("FSHARD_ALL") else COMPILED[model])]
    times, _ = gloo(trained, model, systems)
    assert all(len(seconds) == 2 for seconds in times.values())
    assert set(systems) - set(times) <= {"fsdp2-compiled", "jax", "fshard-tree", "fshard-parts"}


def trained_in_tensor(mesh: Any, sequence: bool) -> None:
    """Three steps of the systems of `make bench-tensor` in float64; an error if losses or parameters differ."""
    sys.path.insert(0, BENCHMARKS)
    warnings.simplefilter("default")
    torch.set_default_dtype(torch.float64)
    import tensor
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    with pytest.raises(RuntimeError, match="do not train alike"):
        tensor.check_alike({"fshard": 1.0, "torch": 1.01}, 1e-3)
    model = dataclasses.replace(tensor.TINY, sequence=sequence)
    steps = tensor.steps_of(model, mesh, ["fshard", "torch", *["fshard-jit"] * sequence])
    times = tensor.step_times(model, steps, mesh.get_local_rank("shard"), rounds=3, warmup=0, close=1e-10)
    assert {len(seconds) for seconds in times.values()} == {3}
    for step in steps.values():
        torch.testing.assert_close(step.params(), steps["torch"].params(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("sequence", [False, True])
def test_split_leaves_train_like_parallelize_module(sequence: bool) -> None:
    """The systems of `make bench-tensor` take the same steps to the last digits, with other rows along "shard":
    otherwise its ratios would compare different things."""
    gloo(trained_in_tensor, sequence, replicate=2)


@pytest.mark.usefixtures("benchmarks")
def test_every_system_and_model_is_tested() -> None:
    """A system or a model that is added without a test of its steps is noticed."""
    from models import DESCRIPTIONS, MODELS, TINY
    from systems import SYSTEMS

    assert {*EAGER, *(name for names in COMPILED.values() for name in names)} == set(SYSTEMS)
    assert set(COMPILED) == set(MODELS) == set(TINY) == set(DESCRIPTIONS)
    assert {name for system in SYSTEMS.values() for name in system.without} <= set(MODELS)


def entry(times: dict[str, list[float]], **fields: Any) -> dict[str, Any]:
    """An entry of results with made-up times."""
    about = {"date": "2026-11-22", "command": "make bench", "machine": "a machine", "versions": {"torch": "2"}}
    return {**about, "rounds": 10, "load": 0.5, "times": times, **fields}


@pytest.mark.usefixtures("benchmarks")
def test_the_ratio_and_its_spread() -> None:
    """The ratio is that of the medians, its range the middle 80% of ratios within a round. A ratio of other numbers, or
    a range that leaves out slow rounds, would make claims that were not measured."""
    import results

    slow = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 110.0]
    times = {"fsdp2": [1.0, 2.0] * 5, "fshard": slow}
    paired = sorted([2.0, 1.5, 4.0, 2.5, 6.0, 3.5, 8.0, 4.5, 10.0, 55.0])
    ((a, b, found),) = results.pairs_of(entry(times))
    assert (a, b) == ("fshard", "fsdp2")
    assert found == {"ratio": statistics.median(slow) / 1.5, "low": paired[1], "high": paired[-2]}
    assert results.ratios({"S": entry(times)})[2] == [["fshard / fsdp2", "4.333 (2.000 to 10.000)"]]


@pytest.mark.usefixtures("benchmarks")
def test_the_tables() -> None:
    """What was not measured is a dash, memory is in MB and beside FSDP2's, and first steps are those of systems that
    compile: a figure in a wrong cell would be believed."""
    import results

    alone = {"fsdp2": {"peak": 10_000_000, "first": [0.5]}, "fshard-jit": {"peak": 5_000_000, "first": [30.0, 5.0]}}
    kinds = {"fshard": {"all_gather": {"count": 2, "bytes": 1_500_000}}, "fsdp2": {"_allgather_base_": {"count": 3}}}
    entries = {"S": entry({"fsdp2": [0.002]}, alone=alone, traffic=kinds), "M": entry({"local": [0.001]})}
    assert {title.split(" ")[0]: rows for title, _, rows in results.tables(entries)} == {
        "Peak": [["fsdp2", "10", "-"], ["fshard-jit", "5 (0.500)", "-"]],
        "Seconds": [["fshard-jit", "30.0, then 5.0", "-"]],
        "Collectives": [["S", "2 all gather (1.5 MB)", "3 allgather base"], ["M", "-", "-"]],
        "Median": [["fsdp2", "2.0", "-"], ["local", "-", "1.0"]],
    }
    assert results.markdown(("A", ["b", "c"], [["d", "e"]])) == "A:\n\n| b | c |\n|---|---|\n| d | e |"


@pytest.mark.usefixtures("benchmarks")
def test_results_are_what_was_saved(tmp_path: Path) -> None:
    """A file of results has the entries that were written, a line for each system, and no file has none."""
    import results

    file, entries = tmp_path / "r.json", {"S": entry({"fsdp2": [0.5, 0.25], "local": [1e-3, 2e-3]}, alone={})}
    assert results.load(file) == {}
    results.save(file, entries)
    assert results.load(file) == entries
    assert '   "fsdp2": [0.5, 0.25],\n' in file.read_text()


@pytest.mark.usefixtures("benchmarks")
def test_the_page_shows_the_results() -> None:
    """The tables of docs/benchmarks.md and RESULTS.md are not those that the script writes from docs/benchmarks.json:
    somebody changed, or forgot, a figure by hand."""
    import page
    import results

    text, entries = page.PAGE.read_text(), results.load(page.RESULTS)
    assert entries
    assert page.with_section(text, page.section(entries)) == text
    assert page.with_section(page.REST.read_text(), page.rest(entries)) == page.REST.read_text()
    assert {name for name, *_ in results.ratios(entries)[2]} >= page.ROWS
    assert page.with_section(text, "nothing") != text
    with pytest.raises(ValueError, match="needs the lines"):
        page.with_section(text + page.END, "nothing")


@pytest.mark.usefixtures("benchmarks")
def test_the_picture(tmp_path: Path) -> None:
    """The picture is drawn of whatever was measured, also where FSDP2 or the memory was not."""
    import page

    alone = {"fsdp2": {"peak": 3}, "fshard": {"peak": 2}}
    file = tmp_path / "p.png"
    page.picture({"S": entry({"fsdp2": [2.0], "fshard": [1.0]}, alone=alone), "M": entry({"local": [1.0]})}, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert page.PICTURE.exists()


@pytest.mark.usefixtures("benchmarks")
def test_what_a_command_selects() -> None:
    """A model has the systems that were asked for, or all but the extra ones, without those that it cannot have."""
    import suite
    from systems import SYSTEMS

    everything = {name for name, system in SYSTEMS.items() if not system.extra}
    assert set(suite.systems_of("S", None)) == everything
    assert set(suite.systems_of("gpt2", None)) == everything - {"jax"}
    assert suite.systems_of("T", ["fsdp2-compiled", "fshard-tree"]) == ["fshard-tree"]


HISTORY = ROOT / "benchmarks" / "HISTORY.md"


@dataclasses.dataclass(frozen=True)
class Change:
    """A row of the history."""

    date: str
    change: str
    prediction: str
    outcome: str
    command: str


def changes(text: str) -> list[Change]:
    """The rows of a history's table. AssertionError where one is not as the page says."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["date", "change", "prediction", "outcome", "command"]
    found = [Change(*row) for row in rows[2:]]
    for row in found:
        datetime.date.fromisoformat(row.date)
        assert row.change, row
        assert row.prediction, row
        assert re.search(r"\d", row.outcome) or row.outcome.startswith("no gain"), row
        assert row.command == "not recorded" or re.fullmatch(r"`make bench.*`", row.command), row
    assert [row.date for row in found] == sorted(row.date for row in found)
    return found


def test_the_history() -> None:
    """Each change that claims speed or memory has a date, what it was expected to give, figures, and the command that
    measured them: otherwise nobody could measure them again."""
    assert changes(HISTORY.read_text())


@pytest.mark.parametrize(
    "row",
    [
        "| today | a change | 0.5 | 0.6 | `make bench` |",
        "| 2026-11-22 | a change | 0.5 | faster | `make bench` |",
        "| 2026-11-22 | a change |  | 0.6 | `make bench` |",
        "| 2026-11-22 | a change | 0.5 | 0.6 | a script |",
        "| 2026-11-21 | a change | 0.5 | 0.6 | `make bench` |",
        "| 2026-11-22 | a change | 0.5 | 0.6 |",
    ],
)
def test_the_check_of_the_history_can_fail(row: str) -> None:
    """A row without a date, a figure or a command, or in the wrong place, is found."""
    good = "| date | change | prediction | outcome | command |\n|---|---|---|---|---|\n"
    good += "| 2026-11-22 | a change | none | no gain | not recorded |\n"
    assert changes(good)
    with pytest.raises((AssertionError, ValueError, TypeError)):
        changes(good + row)


@pytest.mark.usefixtures("benchmarks")
def test_the_cost_on_many_ranks_is_that_of_a_steps_collectives() -> None:
    """The table over many ranks would leave out collectives of a step, or not run."""
    import scale

    with scale.fake_mesh(16) as mesh:
        kinds = [call.kind for call in scale.calls_of_a_step(mesh)]
    assert [kinds.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")] == [14, 8, 2]
    assert all(microseconds > 0 for microseconds in scale.row(16, rounds=1).values())


def needs_of_both_plans(mesh: Any, name: str) -> tuple[list[int], list[int]]:
    """Bytes and collectives of an example's step, without `units=` and with the units chosen by hand."""
    sys.path.insert(0, BENCHMARKS)
    warnings.simplefilter("default")
    import plans

    return plans.needs(name, mesh, None), plans.needs(name, mesh, plans.EXAMPLES[name])


# the examples with other units by hand
@pytest.mark.parametrize("name", ["classifier", "lora", "nanogpt", "resume", "pinn", "maml", "diffusion", "meanflow"])
def test_a_plan_without_options_needs_no_more_than_one_by_hand(name: str) -> None:
    """An example without `units=` would take more memory, or send more messages, and its reader would not know."""
    for alone, by_hand in gloo(needs_of_both_plans, name):
        assert all(found <= 1.05 * best for found, best in zip(alone, by_hand, strict=True)), (alone, by_hand)
