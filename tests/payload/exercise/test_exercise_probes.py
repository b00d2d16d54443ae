"""The scripts of the exercises: what they measure is what the chapters say."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from pytest import approx

import exercise_1_1 as ex11
import exercise_2_1 as ex21
import exercise_3_1 as ex31
import exercise_4_1 as ex41
import exercise_4_2 as ex42
import exercise_4_3 as ex43
import exercise_5_1 as ex51
import exercise_6_1 as ex61
from ranks import show
from support.place import ROOT

pytestmark = pytest.mark.usefixtures("fork_server")


def test_every_exercise_has_its_chapter_and_its_files() -> None:
    folder = ROOT / "docs" / "exercises"
    text = "".join(page.read_text() for page in folder.glob("*.md"))
    titles = {n.replace(".", "_") for n in re.findall(r"^## ([\d.]+) ", text, re.MULTILINE)}
    scripts = {path.stem.removeprefix("exercise_") for path in folder.glob("exercise_*.py")}
    assert titles - scripts == {"6_2", "7_1", "7_2"} and scripts < titles  # those are a study
    assert all(f"python docs/exercises/exercise_{number}.py\n" in text for number in scripts)
    to_complete = {path.stem.replace(".", "_") for path in folder.glob("skeletons/*.txt")}
    assert to_complete == {path.stem.removeprefix("check_") for path in folder.glob("check_*.py")}


# What a chapter says of each table.
SAYS: list[tuple[Callable[[], tuple], Callable[[Any, Any], bool]]] = [
    (ex11.batches, lambda t, c: c("batches") == c("shape[1:] == (3, 32, 32)") == [16, 16, 16]
        and [row[4] for row in t[2]] == [15, 0, 0]),
    (ex21.places, lambda t, c: len(set(c("process"))) == 2 and c("sum") == [3, 3]
        and c("own value") == [1, 2]),
    (ex21.incomplete, lambda t, c: "imeout" in c("init_process_group")[2]
        and c("init_process_group")[:2] == ["joined", "joined"]
        and c("init_process_group")[3] == "does not come" and c("took (s)")[2] >= ex21.WAIT_S),
    (ex31.shares, lambda t, c: c("also seen by the other") == [16, 16, 0, 0]
        and c("samples") == [16, 16, 8, 8]),
    (ex31.orders, lambda t, c: c("seen before") == [False, True, True, False, False, False]),
    (ex31.files, lambda t, c: c("bytes found")[2:] == [1_000_000] * 2
        and c("bytes in the end")[2:] == [1_000_000] * 2
        and c("bytes found")[0] == c("bytes in the end")[0]),
    (ex31.uneven, lambda t, c: c("counted") == [4, 6, 5]
        and c("accuracy (%)") == approx([75, 100 * 4 / 6, 60])),
    (ex41.gradients, lambda t, c: c("gradient") == [4, 8, 6, 6]
        and [len(set(c("weight after a step")[i : i + 2])) for i in (0, 2)] == [2, 1]),
    (ex41.held, lambda t, c: len(set(c("parameters (MiB)"))) == 1 and len(t[2]) == 6),
    (ex42.forward, lambda t, c: {row[0]: [float(x) for x in row[2:]] for row in t[2]} == {
        "DDP": [8, 8, 8, 16], "SHARD_GRAD_OP": [4, 12, 12, 8], "FULL_SHARD": [4, 5, 4, 8]}),
    (ex42.groups, lambda t, c: c("all-gathers") == [2, 4, 8, 16]
        and c("reduce-scatters") == [1, 2, 4, 8]
        and c("in forward (MiB)") == [12, 8, 6, 5]),
    (ex43.per_step, lambda t, c: c("collectives")[1:3] == [3, 24] and min(c("best (ms)")) > 0
        and c("held (MiB)")[3:] == approx([24, 12, 12], abs=0.01)),
    (ex42.sums, lambda t, c: c("1 + 1,000 times 0.001") == approx([2, 1, 1], abs=1e-4)
        and c("4,096 times 0.01")[1] < 10
        and c("4,096 times 0.01")[0] == approx(c("4,096 times 0.01")[2], rel=0.01)),
    (ex51.left_over, lambda t, c: min(c("sockets")[1:3]) > c("sockets")[0]
        and c("sockets")[5] < c("sockets")[4] and c("threads")[2] > c("threads")[0]),
    (ex51.alone, lambda t, c: "imed out" in c("what it says")[0]
        and "Rank 1 failed to pass" in c("what it says")[2]
        and min(c("waited (s)")[0], c("waited (s)")[2]) >= ex51.WAIT_S * 0.9),
    (ex61.gradients,
        lambda t, c: c("norm without")[-1] > 2 * c("norm with zero_grad")[-1]),
    (ex61.memory, lambda t, c: c("kept for backward (MiB)")[0] == 0
        and c("kept for backward (MiB)")[1] > 50),
    (ex61.modes, lambda t, c: c("two passes differ by")[0] > 0 == c("two passes differ by")[1]
        and c("running mean moves by")[0] > 0 == c("running mean moves by")[1]),
    (ex61.means, lambda t, c: c(t[1][2])[0] != c(t[1][2])[1]
        and c(t[1][4]) == approx(c(t[1][5])) and abs(c(t[1][3])[0] - c(t[1][5])[0]) > 0.01),
]  # fmt: skip


@pytest.mark.parametrize(("probe", "right"), SAYS, ids=lambda x: x.__name__)
def test_a_script_measures_what_its_chapter_says(probe: Any, right: Any, capsys: Any) -> None:
    table = _, head, rows = probe()
    show(*table)
    said = capsys.readouterr().out
    assert right(table, lambda name: [row[head.index(name)] for row in rows]), said
