"""compare: Student's t against published values; the intervals; the gate; one repeat."""

import math

import pandas as pd
import pytest

from jobkit.analysis.compare import compare, main
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.scaling.spread import CONFIDENCE, pool, quantile, tail
from jobkit.paths import StudyPaths
from jobkit.spec.command import COMMAND_LINE
from support.fake_study import whole_study
from support.measured_study import results_of
from support.refusals import refusal


def runs(rates: dict[int, list[float]], **columns: str) -> pd.DataFrame:
    return results_of({"ddp": rates}).runs.assign(**columns)


def test_the_quantiles_of_student_are_those_of_the_tables() -> None:
    for freedom, t in ((1, 12.706), (2, 4.303), (10, 2.228), (30, 2.042), (10**6, 1.960)):
        assert quantile(freedom, CONFIDENCE) == pytest.approx(t, abs=6e-4)
        assert tail(t, freedom) == pytest.approx(0.05, abs=1e-4)


def test_the_intervals_of_several_sizes_are_wider_by_their_number() -> None:
    rates = [94.0, 95.0], [188.0, 189.0], [100.0, 101.0], [200.0, 203.0]
    studies = (runs(dict(zip((1, 2), pair, strict=True))) for pair in (rates[:2], rates[2:]))
    size, _, whole = compare(*studies)[0]
    spread = pool([(values, n) for values, n in zip(rates, (1, 2, 1, 2), strict=True)])
    assert spread and size.half_width and whole.half_width
    error = math.hypot(spread.error((rates[0], 1)), spread.error((rates[2], 1)))
    assert size.half_width == pytest.approx(quantile(4, 1 - 0.05 / 3) * error)
    assert whole.half_width < size.half_width


def test_a_loss_on_the_whole_is_found_that_no_single_size_shows() -> None:
    rates = {n: [97.0 * n, 100 * n, 103 * n] for n in (1, 2, 4)}
    now, before = runs({n: [0.95 * x for x in own] for n, own in rates.items()}), runs(rates)
    *sizes, whole = compare(now, before)[0]
    assert whole.name == "on the whole" and whole.slower
    assert len(sizes) == 3 and not any(c.slower for c in sizes)
    assert all("may be chance" in c.line() for c in compare(before, before)[0])


def test_two_days_are_named_where_each_study_was_measured_on_one() -> None:
    now, before = runs({1: [94.0, 94.2]}), runs({1: [100.0, 100.3]})
    times = {"now": now.assign(start_time_s=1.7e9), "then": before.assign(start_time_s=1.69e9)}
    (line,) = compare(times["now"], times["then"])[1]
    assert line.startswith("each study was measured on one day, and days differ: repeat both on ")
    weeks = before.assign(start_time_s=[1.69e9, 1.7e9])
    assert compare(times["now"], weeks)[1] == compare(now, before)[1] == []


def test_a_tolerance_is_part_of_the_test() -> None:
    now, before = runs({1: [94.0, 94.2, 93.9]}), runs({1: [100.0, 100.3, 99.8]})
    for tolerance, slower in ((0.0, True), (0.03, True), (0.08, False)):
        (one,) = compare(now, before, tolerance)[0]
        assert one.slower is slower
    # It is slower for certain, and by less than that.
    assert one.line().endswith("]: within 8 %")
    (one,) = compare(before, now)[0]
    assert not one.slower
    assert "faster beyond chance" in one.line()


def test_one_repeat_is_not_judged_and_what_differs_is_named() -> None:
    one, two = runs({1: [90.0], 2: [170.0]}), runs({1: [100.0]}, git_commit="abc", device="H100")
    found, remarks = compare(one, two)
    assert [c.half_width for c in found] == [None]
    assert found[0].line() == ("ddp at 1 rank: -10.0%: not judged: that takes 2 repeats of a size")
    assert remarks[:2] == ["device differs: ? against H100", "git_commit differs: ? against abc"]
    assert remarks[-1] == "only in the first: ddp at 2 ranks (strong scaling, images/s)"
    one, two = runs({2: [90.0]}), runs({2: [100.0]}, throughput_unit="tokens/s", scaling="weak")
    assert compare(one, two)[1][-2:] == [
        "only in the first: ddp at 2 ranks (strong scaling, images/s)",
        "only in the second: ddp at 2 ranks (weak scaling, tokens/s)",
    ]
    _, remarks = compare(one, one.assign(nodes=2, ranks_per_node=1))
    assert remarks[-1] == "only in the second: ddp at 2 ranks on 2 nodes (strong scaling, images/s)"


def test_steps_of_which_the_work_may_differ_are_not_judged_and_settings_are_named() -> None:
    now, before = (runs({1: [x, 1.01 * x], 2: [x, x]}, throughput_unit="steps/s") for x in (9, 5))
    one = {"strategy": "ddp", "launcher": "srun", "bs": 8, COMMAND_LINE: ("train.py", "{bs}")}
    for changes, said, judged in (
        ({"launcher": "once"}, "launcher differs: srun against once", True),
        ({"bs": 9}, "bs differs: 8 against 9", False),
        ({COMMAND_LINE: ("x",)}, "command line differs: train.py {bs} against x", False),
    ):
        both = {"ddp": one}, {"ddp": one | changes}
        found, remarks = compare(now, before, both=both)
        assert remarks == [said]
        assert [c.half_width is not None for c in found] == [judged] * (2 + judged)
        assert judged or "not judged: the commands differ, and steps/s do" in found[0].line()
        in_images = (table.assign(throughput_unit="images/s") for table in (now, before))
        assert all(c.half_width for c in compare(*in_images, both=both)[0])


def test_the_command_is_a_gate_also_by_a_kept_table(capsys) -> None:
    plan = whole_study("old", strategies=("ddp",), gpus=(1, 2), repeats=3)
    whole_study("single-runs", strategies=("ddp",), gpus=(1, 2))
    assert main(["old", "single-runs"]) == 0  # the other's repeats show the spread
    assert "2 of 2 sizes judged: 0 slower beyond chance" in capsys.readouterr().out
    assert refusal(main, ["old"], capsys) and refusal(main, ["old", "nowhere.csv"], capsys)
    assert main(["single-runs", "single-runs"]) == 3
    whole_study("new", strategies=("ddp",), gpus=(1, 2), settings={"accumulate": 2})
    main(["new", "old"])
    assert "\naccumulate differs: 2 against 1\n" in f"\n{capsys.readouterr().out}"
    path = StudyPaths(plan.paths.folder).results
    assert main(["old", str(path)]) == 0
    table = pd.read_csv(path)
    table["throughput"] *= 1.2
    faster = path.with_name("faster.csv")
    table.to_csv(faster, index=False)
    assert main(["old", str(faster), "--tolerance", "5"]) == 4
    assert "slower by more than 5 % beyond chance" in capsys.readouterr().out
    assert main(["old", str(faster), "--tolerance", "25"]) == 0
    assert main(["old", str(faster), "--tolerance", "100"]) == 2
    faster.write_text("a,b\n1,2\n")
    assert main(["old", str(faster)]) == 2
    assert "no size that both have measured: " in capsys.readouterr().err


def test_a_series_of_two_commits_is_named_first() -> None:
    study = results_of({"ddp": {1: [100.0, 101.0], 2: [190.0, 191.0]}})
    study.runs["git_commit"] = ["a" * 40, "b" * 40] * 2
    assert "; runs of one size differ in git commit" in verdict(study, "GPUs")[0]
