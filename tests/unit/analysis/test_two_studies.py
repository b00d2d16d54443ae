"""compare: Welch's test and Holm's correction against published values; the gate; one repeat."""

import math
import random

import pandas as pd
import pytest

from jobkit.analysis.compare.cli import main
from jobkit.analysis.compare.compare import compare
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.scaling.spread import CONFIDENCE
from jobkit.analysis.scaling.student import quantile, tail
from jobkit.analysis.scaling.welch import holm, welch
from jobkit.analysis.tables.comparable import apart, mixed
from jobkit.paths import StudyPaths
from support.fake_study import whole_study
from support.measured_study import results_of


def runs(rates: dict[int, list[float]], **columns: str) -> pd.DataFrame:
    return results_of({"ddp": rates}).runs.assign(**columns)


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980), (10**6, 1.960)],
)
def test_the_quantiles_of_student_are_those_of_the_tables(freedom: int, t: float) -> None:
    assert quantile(freedom, CONFIDENCE) == pytest.approx(t, abs=6e-4)
    assert tail(t, freedom) == pytest.approx(0.05, abs=1e-4)


def test_welch_and_holm_are_as_computed_by_hand() -> None:
    """Variances 1 and 4 of 3 and 4 values: freedom (1/3 + 1)^2 / (1/18 + 1/3) = 4.571."""
    step = 2 * math.sqrt(0.6)
    found = welch([9.0, 10.0, 11.0], [2 - 1.5 * step, 2 - step / 2, 2 + step / 2, 2 + 1.5 * step])
    assert found.difference == pytest.approx(8.0)
    assert found.error == pytest.approx(math.sqrt(1 / 3 + 1))
    assert found.freedom == pytest.approx((4 / 3) ** 2 / (1 / 18 + 1 / 3))
    assert found.p_value(margin=8.0) == pytest.approx(1.0)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_equal_sizes_are_rarely_told_apart_and_a_loss_of_a_tenth_is() -> None:
    """200 comparisons of three equal sizes: corrected, at most 5 % have any false difference."""
    draw = random.Random(1)
    false = found = 0
    for _ in range(200):
        pairs = [[[draw.gauss(0, 0.02) for _ in range(4)] for _ in "ab"] for _ in range(3)]
        false += min(holm([welch(*pair).p_value() for pair in pairs])) < 0.05
        pairs[0][0] = [value - 0.1 for value in pairs[0][0]]
        found += holm([welch(*pair).p_value() for pair in pairs])[0] < 0.05
    assert false <= 20  # 10 expected at most
    assert found >= 190


def test_a_tolerance_is_part_of_the_test() -> None:
    now, before = runs({1: [94.0, 94.2, 93.9]}), runs({1: [100.0, 100.3, 99.8]})
    for tolerance, slower in ((0.0, True), (0.03, True), (0.08, False)):
        (one,) = compare(now, before, tolerance)[0]
        assert one.slower is slower
    # It is slower for certain, and by less than that.
    assert "]: may be within 8 % (p = 1)" in one.line()
    (one,) = compare(before, now)[0]
    assert one.differs and not one.slower
    assert "faster beyond chance" in one.line()


def test_one_repeat_is_not_judged_and_what_differs_is_named() -> None:
    one, two = runs({1: [90.0], 2: [170.0]}), runs({1: [100.0]}, git_commit="abc", device="H100")
    found, remarks = compare(one, two)
    assert [c.p_value for c in found] == [None]
    assert found[0].line() == (
        "ddp at 1 rank: -10.0% (1 and 1 run): not judged: that takes 2 repeats on both sides"
    )
    assert remarks[:2] == ["device differs: ? against H100", "git_commit differs: ? against abc"]
    assert remarks[-1] == "only in the first: ddp at 2"


def test_what_keeps_the_same_ranks_from_being_compared_is_said() -> None:
    one, two = runs({1: [90.0]}), runs({1: [100.0]}, throughput_unit="tokens/s", scaling="weak")
    found, remarks = compare(one, two)
    assert found == []
    assert remarks[-2:] == [
        "only in the first: ddp at 1 (strong scaling, not weak scaling, images/s, not tokens/s)",
        "only in the second: ddp at 1 (weak scaling, not strong scaling, tokens/s, not images/s)",
    ]
    _, remarks = compare(runs({2: [90.0]}), runs({2: [90.0]}).assign(nodes=2, ranks_per_node=1))
    assert remarks[-2:] == [
        "only in the first: ddp at 2 (1x2, not 2x1)",
        "only in the second: ddp at 2 (2x1, not 1x2)",
    ]


def test_the_command_is_a_gate(capsys) -> None:
    for name in ("old", "new"):
        whole_study(name, strategies=("ddp",), gpus=(1, 2), repeats=3)
    assert main(["new", "old"]) == 0
    assert "2 of 2 sizes judged: 0 slower beyond chance" in capsys.readouterr().out
    whole_study("single-runs", strategies=("ddp",), gpus=(1, 2))
    assert main(["new", "single-runs"]) == 3
    assert main(["new"]) == 2
    assert main(["new", "--reference", "nowhere.csv"]) == 2
    whole_study("fsdp-only", strategies=("fsdp",), gpus=(1,))
    assert main(["new", "fsdp-only"]) == 2


def test_a_kept_table_is_a_reference(capsys) -> None:
    from jobkit.analysis.cli import collect_main

    plan = whole_study("old", strategies=("ddp",), gpus=(1, 2), repeats=3)
    assert collect_main(["old"]) == 0
    path = StudyPaths(plan.paths.folder).results
    assert main(["old", "--reference", str(path)]) == 0
    table = pd.read_csv(path)
    for name in ("throughput", "images_per_s"):
        table[name] *= 1.2
    faster = path.with_name("faster.csv")
    table.to_csv(faster, index=False)
    assert main(["old", "--reference", str(faster), "--tolerance", "5"]) == 4
    assert "slower by more than 5 % beyond chance" in capsys.readouterr().out
    assert main(["old", "--reference", str(faster), "--tolerance", "25"]) == 0
    assert main(["old", "--reference", str(faster), "--tolerance", "100"]) == 2
    faster.write_text("a,b\n1,2\n")
    assert main(["old", "--reference", str(faster)]) == 2
    assert "it lacks series" in capsys.readouterr().err


def test_a_series_of_two_commits_is_named_first_and_set_apart() -> None:
    study = results_of({"ddp": {1: [100.0, 101.0], 2: [190.0, 191.0]}})
    study.runs["git_commit"] = ["a" * 40, "b" * 40] * 2
    assert mixed(study.runs)[0].startswith("ddp mixes commits of the code, with their runs: aaaa")
    assert verdict(study, "GPUs")[0] == mixed(study.runs)[0]
    study.runs["series"] = apart(study.runs)
    assert sorted(set(study.runs["series"])) == ["ddp, aaaaaaaaaaaa", "ddp, bbbbbbbbbbbb"]
    assert mixed(study.runs) == []
