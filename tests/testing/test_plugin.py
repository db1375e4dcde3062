"""pytest's plugin: the mark and the fixture `world`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fshard

PLUGIN = ("-p", "pytest_fshard", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")


def ranks(mesh, *args):
    """This rank's number, the sizes of both axes, and the arguments that were passed."""
    return mesh.get_local_rank("shard"), mesh.size("shard"), mesh.size("replicate"), *args


@pytest.mark.world(shard=[1, 3], replicate=[1, 2])
def test_a_test_runs_for_each_mesh(world):
    """A marked test runs once per mesh, and `world.run` returns results in rank order: otherwise a mesh would go
    untested."""
    shard, replicate = world.axes["shard"], world.axes["replicate"]
    found = world.run(ranks, "x", 7)
    assert len(found) == world.size == shard * replicate
    assert found == [(s, shard, replicate, "x", 7) for _ in range(replicate) for s in range(shard)]


def test_without_a_mark_there_are_two_ranks(world):
    """Without the mark `world` has two ranks that communicate: otherwise a test of collectives would test nothing."""
    assert [x.item() for x in world.run(lambda mesh: fshard.all_reduce(torch.ones(()), mesh, "shard"))] == [2.0, 2.0]


def test_the_names_of_tests(pytester):
    """Test names show the mesh and the mark is registered: otherwise users could not select a mesh, or strict
    markers would fail."""
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.world(shard=[1, 2], replicate=[1, 2])
        def test_a(world): pass
        @pytest.mark.world(shard=4)
        def test_b(world): assert world.size == 4
        """
    )
    found = pytester.runpytest("--strict-markers", "-v", "-W", "error", *PLUGIN)
    found.assert_outcomes(passed=5)
    found.stdout.fnmatch_lines([f"*::test_a?{name}? PASSED*" for name in ("1", "2", "2x1", "2x2")])
    assert pytester.runpytest("--markers", *PLUGIN).stdout.str().count("@pytest.mark.world(shard=") == 1


@pytest.mark.parametrize(
    ("mark", "argument", "text"),
    [
        ("shard=[]", "world", "mark world: shard=[[]]: expected numbers of ranks: shard=[[]1, 2, 3[]]"),
        ("replicate=[0]", "world", "mark world: replicate=[[]0[]]: expected numbers of ranks"),
        ("ranks=[2]", "world", "test_a: mark world: *unexpected keyword argument 'ranks'; write world(shard="),
        ("shard=[2]", "tmp_path", "test_a: mark world: expected an argument `world` of the test"),
    ],
)
def test_a_wrong_mark_is_an_error(pytester, mark, argument, text):
    """A wrong mark is an error that says what was expected; without it the test would run on no mesh, or on a wrong
    one."""
    pytester.makepyfile(f"import pytest\n@pytest.mark.world({mark})\ndef test_a({argument}): pass\n")
    found = pytester.runpytest(*PLUGIN)
    assert found.ret != 0
    found.stdout.fnmatch_lines([f"*{text}*"])


def test_the_tests_of_the_page_on_testing_pass(pytester):
    """The tests in docs/testing.md pass as they stand: otherwise a user who copies them would start with failures."""
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    pytester.makepyfile("\n".join(blocks))
    pytester.runpytest(*PLUGIN[:4]).assert_outcomes(passed=6)


def test_a_failing_rank_fails_the_test(pytester):
    """An error on a rank fails the test and the report has the rank: otherwise a user would not know where to look."""
    pytester.makepyfile("def test_a(world):\n    world.run(lambda mesh: 1 / mesh.get_rank())\n")
    found = pytester.runpytest(*PLUGIN)
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*ZeroDivisionError*", "*(raised in simulated rank 0 of 2)*"])


def test_pytest_starts_without_torch():
    """The plugin imports neither torch nor fshard until a test asks for ranks: otherwise every pytest run would
    start slowly."""
    code = "import sys, pytest_fshard; print(sorted({'torch', 'fshard', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
