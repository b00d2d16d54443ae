"""check-claims: known wrong claims are found, right ones are left alone, the others are named."""

import pytest

from jobkit.analysis.claims.cli import main
from jobkit.analysis.claims.judge import Verdict, Work, check
from jobkit.analysis.claims.numbers import number, seconds

NO_WORK = Work()


def judged(text: str, work: Work = NO_WORK) -> list[Verdict]:
    return [v for v in check(text, work) if v.follows is not None]


def wrong(text: str, work: Work = NO_WORK) -> list[str]:
    return [f"{v.line}: {v.said}" for v in judged(text, work) if not v.follows]


def unjudged(text: str) -> list[str]:
    return [v.said for v in check(text) if v.follows is None and v.claim.kind != "rate"]


TABLE = """| GPUs | time (s) | speed-up |
|---:|---:|---:|
| 1 | 480 | 1.0 |
| 2 | 245 | 1.95x |
| 4 | 128 | 3.8x |
| 8 | 68 | **7.6x** |
"""


def test_a_headline_that_is_better_than_its_table() -> None:
    """480/245 may be 1.953 to 1.965, and 480/128 3.73 to 3.77; 480/68 is at most 7.12."""
    assert wrong(TABLE) == ["6: 7.6x"]
    (verdict,) = (v for v in judged(TABLE) if not v.follows)
    assert verdict.how == "480 / 68 = 7.059x [7, 7.119]"
    assert len(judged(TABLE)) == 3  # the 1.0 of the base itself is no claim


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("| GPUs | s | speedup |\n|-|-|-|\n| 1 | 1.3 | 1.00 |\n| 2 | 0.7 | 1.97 |\n", []),
        ("GPUs,s/epoch,speed-up\n1,480,1\n8,68,7.6\n", ["3: 7.6x"]),
        ("GPUs;time;speed-up\n1;3.034,6;1\n4;765,7;3,96\n8;400,0;8,1\n", ["4: 8.1x"]),
        ("GPUs,time (us),speedup\n1,2 700,1\n4,900,3.0\n", []),
        ("GPUs,time,speed-up\n1,60 min,1\n4,0:20:00,3\n8,900 s,5.1\n", ["4: 5.1x"]),
        ("GPUs,rows/s,speed-up\n1,250K/sec,1\n8,1.8M/sec,7.2\n16,2.5M,12\n", ["4: 12x"]),
        (
            "ranks\tsamples/s\tefficiency\n1\t1 000\t100 %\n4\t3 000\t75 %\n8\t4000\t60%",
            ["4: 60 %"],
        ),
        ("ranks,throughput,efficiency\n1,1000,1.0\n4,3000,0.85\n", ["3: 0.85 %"]),
        ("nodes,speed-up,efficiency\n1,1,1\n4,3,0.75\n8,4,0.75\n", ["4: 0.75 %"]),
        ("GPU,#GPUs,time,speedup\nA100,1,60,1\nA100,4,20,3.0\nA100,8,15,5.0\n", ["4: 5.0x"]),
        ("GPUs,images/s/GPU,efficiency\n1,400,100%\n2,390,97.5%\n4,300,95%\n", ["4: 95 %"]),
        ("GPUs,time (s),speed-up\n4,20,3.00\n1,60,1.00\n", []),
        ("GPUs,time,speed-up\n1,402,1\n1,398,1\n2,200,>1.9x\n", []),
        # What it costs is no time: 8.12 / 8.42 would be a speed-up of 0.96.
        ("nodes,time-to-solution (h),speed-up,node-hours\n1,8.12,1,8.12\n2,4.21,1.93,8.42\n", []),
        ("nodes,time (h),node_hours,speed-up\n1,8.12,8.12,1\n2,4.21,8.42,1.99\n", ["3: 1.99x"]),
    ],
)
def test_numbers_and_headings_of_many_kinds(text: str, found: list[str]) -> None:
    assert len(judged(text)) >= 1
    assert wrong(text) == found


def test_speed_ups_that_are_not_over_sizes_are_not_judged() -> None:
    text = (
        "| GPUs | FP32 img/s | mixed img/s | Speedup (FP32 - mixed) | Weak scaling - mixed |\n"
        "|-|-|-|-|-|\n| 1 | 100 | 240 | 2.40 | 1.00 |\n| 8 | 780 | 1700 | 2.18 | 7.9 |\n"
    )
    assert unjudged(text) == ["2.40x", "2.18x"]
    assert wrong(text) == ["4: 7.9x"]
    cpu = "GPUs,time,Speed-up over 64-core CPU\n1,60,12\n4,20,36\n"
    assert judged(cpu) == []
    assert len(unjudged(cpu)) == 2


def test_each_series_has_its_own_base() -> None:
    head = "| Strategy | GPUs | Time | Speedup |\n|-|-|-|-|\n| DDP | 1 | 100 | 1.0 |\n"
    own = head + "| | 4 | 30 | 3.3 |\n| FSDP | 1 | 200 | 1 |\n| | 4 | 50 | 4.0 |\n"
    assert wrong(own) == []
    assert wrong(own.replace("4.0", "3.3")) == ["6: 3.3x"]
    shared = head + "| DDP | 4 | 30 | 3.3 |\n| FSDP | 2 | 55 | 1.82 |\n| FSDP | 4 | 32 | 3.13 |\n"
    assert wrong(shared) == []  # FSDP relative to DDP on one GPU, as its first claim says
    assert wrong(shared.replace("3.13", "3.6")) == ["6: 3.6x"]
    assert unjudged(shared.replace("1.82", "1.5").replace("3.13", "2.6")) == ["1.5x", "2.6x"]


def test_weak_scaling_is_judged_by_its_heading_or_by_the_option() -> None:
    table = "| GPUs | time (s) | efficiency |\n|-|-|-|\n| 1 | 100 | 100% |\n| 4 | 125 | 80% |\n"
    assert wrong(f"## Weak scaling\n\n{table}") == []
    assert wrong(table, Work(weak=True)) == []
    assert wrong(f"## Strong scaling\n\n{table}") == ["6: 80 %"]
    caption = f"**Weak scaling** (64 per GPU)\n\n{table}"
    assert wrong(caption) == []
    assert wrong(caption.replace("80%", "90%")) == ["6: 90 %"]


def test_a_time_per_step_is_of_weak_or_strong_scaling_where_no_heading_says() -> None:
    """100 / 110 is 90.9 %, over 4 GPUs 22.7 %."""
    table = "GPUs,time per step (ms),efficiency\n1,100,100%\n4,110,{}%\n"
    assert [wrong(table.format(said)) for said in (91, 23, 50)] == [[], [], ["3: 50 %"]]


def test_a_size_may_stand_in_the_first_column_or_along_the_top() -> None:
    first = "| | images/s | efficiency |\n|-|-|-|\n| Single GPU | 100 | 100% |\n"
    assert wrong(first + "| DP (4 GPUs) | 320 | 80% |\n| DDP (4 GPUs) | 380 | 99% |\n") == [
        "5: 99 %"
    ]
    top = "| | 1 GPU | 4 GPUs |\n|-|-|-|\n| time (s) | 60 | 20 |\n| speed-up | 1 | 3.5 |\n"
    assert [v.follows for v in judged(top)] == [False]


def test_lines_of_a_code_block_and_words_beside_it() -> None:
    """The key figures above are judged by the times below; each series has its own."""
    text = """# Fast
```
2-GPU training: 1.95x speedup
8-GPU training: 7.6x speedup
overhead: < 5 %
```
```
Single GPU:  480s/epoch
2 GPUs:      245s/epoch (1.96x speedup, 98% efficiency)
8 GPUs:       68s/epoch (7.06x speedup, 88% efficiency)
```
```
1 Node (8 GPUs):   850s/epoch
4 Nodes (32 GPUs): 230s/epoch (3.70x speedup)
Scaling Efficiency: 85.2% at 32 GPUs
```
- Linear scaling: proven.
"""
    assert wrong(text) == ["4: 7.6x", "15: 85.2%", "17: linear scaling"]
    assert len(judged(text)) == 9
    assert unjudged(text) == ["< 5 %"]


SENTENCES = "\n\n| GPUs | seconds |\n|--|--|\n| 1 | 480 |\n| 2 | 245 |\n| 8 | 68 |\n"


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("On 8 GPUs it is 7.6x faster.", [False]),
        ("The 8-GPU run is 7.1 times faster than one GPU.", [True]),
        ("A speed-up of 7.6x on eight GPUs.", [False]),
        ("Parallel efficiency is 95 percent at 8 GPUs.", [False]),
        ("Speed-ups of 1.96x and 7.6x on 2 and 8 GPUs.", [True, False]),
        ("GPU utilisation was 98 % on 8 GPUs.", []),
        ("Accuracy: 93.1 % at 8 GPUs.", []),
        ("It is 2x faster on 8 GPUs than last year's.", []),
        ("An ideal speed-up would be 8x on 8 GPUs.", []),
        ("We used 4 processes x 40 threads, and near-linear scaling.", []),
    ],
)
def test_a_sentence_is_judged_where_size_and_factor_belong_together(sentence, expected) -> None:
    assert [v.follows for v in judged(sentence + SENTENCES)] == expected
    assert len(check(sentence + SENTENCES)) >= bool(expected)


def test_a_rate_that_the_time_does_not_give() -> None:
    row = 'GPUs,time_s,samples_per_s\n8,70,"{}"\n'
    assert wrong(row.format("2,840"), Work([16000], [10])) == ["2: 2,840 samples/s"]
    assert wrong(row.format("2,286"), Work([16000], [10])) == []
    key_figures = "- Time: ~70 seconds for 10 epochs\n- Throughput: ~2,840 samples/second\n"
    config = "\n```yaml\nnum_samples: 20000\ntrain_split: 0.8\n```\n"
    assert wrong(key_figures + config) == ["2: ~2,840 samples/second"]
    assert wrong(key_figures + config.replace("0.8", "0,8")) == ["2: ~2,840 samples/second"]
    assert wrong(key_figures + config.replace("0.8", "1.0")) == []
    assert judged(key_figures) == []


def test_lists_of_numbers_in_python() -> None:
    """Memory that is a total over the GPUs beside some that is not; 001 of a course had it."""
    text = """methods = ['Single GPU', 'DP (4 GPUs)', 'FSDP (4 GPUs)']
throughput = [100, 320, 350]  # Samples/second
memory_usage = [16, 64, 20]  # GB
scaling_efficiency = [100, 80, 97.5]  # Percentage
"""
    assert wrong(text) == ["1: 64", "1: 97.5 %"]
    assert unjudged(text) == ["16", "20"]


def test_rates_and_memory_that_nothing_gives_are_named(tmp_path, capsys) -> None:
    """They are what the speed-ups follow from, and may be wrong themselves."""
    file = tmp_path / "claims.md"
    head = "| GPUs | images/s | memory (GB) | speed-up |\n|-|-|-|-|\n"
    file.write_text(f"{head}| 1 | 100 | 16 | 1 |\n| 4 | 380 | 12 | 3.8 |\n")
    assert main([str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "not judged, no samples, epochs and time beside it: 100 (line 3), 380 (line 4)",
        "not judged, memory follows from no other number: 16 (line 3), 12 (line 4)",
    ]


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("1.95x", 1.945, 1.955),
        ("2 840", 2839.5, 2840.5),
        ("1.234,5", 1234.45, 1234.55),
        ("1,95", 1.945, 1.955),
        ("1.49654M", 1496535, 1496545),
        ("~70", 65, 75),
        ("2-3x", 1.5, 3.5),
        ("112.9 \N{PLUS-MINUS SIGN} 0.5", 112.4, 113.4),
    ],
)
def test_a_number_is_the_interval_of_its_rounding(text: str, low: float, high: float) -> None:
    found = number(text)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((low, high))


def test_a_name_is_no_number_and_a_time_has_a_unit() -> None:
    assert number("A100") is None
    for text, head, low in (
        ("900 us", "", 899.5e-6),
        ("1h 20min", "", 4770),
        ("6", "t [min]", 330),
    ):
        found = seconds(text, head)
        assert found is not None and found.low == pytest.approx(low)


def test_the_command(tmp_path, capsys) -> None:
    file = tmp_path / "claims.md"
    file.write_text(TABLE + "\nMemory falls by 50 %.\n")
    assert main([str(file)]) == 4
    first, count, last = capsys.readouterr().out.splitlines()
    assert first == "line 6: 7.6x does not follow: 480 / 68 = 7.059x [7, 7.119]"
    assert count.endswith("2 of 3 judged claims follow")
    assert last == "not judged, no speed-up or efficiency of one size: 50 % (line 8)"
    file.write_text(TABLE.replace("7.6x", "7.1x"))
    assert main([str(file)]) == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"hello", "nothing to check: no table, line or sentence"),
        (b"", "nothing to check: no table, line or sentence"),
        (b"GPUs,time\n1,10\n", "nothing to check: no table, line or sentence"),
        (b"It is 4x faster, and scales well.", "nothing to check: no claim stands"),
        (b"GPUs,time,speed-up\nfour,fast,great\n", "nothing to check"),
        (b"GPUs,time,speed-up\n1,10,1\n2,n/a,1.9\n4,0,5\n", "nothing to check"),
        (b"\xff\xfe", "utf-8"),
        (None, "No such file"),
    ],
)
def test_what_cannot_be_checked_is_wrong_usage(content, said, tmp_path, capsys) -> None:
    file = tmp_path / "claims.csv"
    if content is not None:
        file.write_bytes(content)
    assert main([str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("heads", "rows", "right"),
    [
        ("GPUs,time_s,time_low_s,speed_up,speed_up_low", "1,100,98,1,1;2,52,51,{},1.86", "1.92"),
        ("GPUs,time,min,max,speed-up", "1,9,8,11,1;2,5,4,6,{}", "1.80"),
        ("GPUs,max img/s,img/s,efficiency,efficiency upper", "1,9,8,1,1;2,18,15,{},.98", "0.94"),
        ("GPUs,time (min),speed-up (95% CI)", "1,60,1;2,31,{}", "1.94"),
    ],
)
def test_the_ends_of_intervals_are_no_claims_and_no_times(heads, rows, right) -> None:
    text = f"{heads}\n{rows}\n".replace(";", "\n")
    for said, follows in ((right, True), ("0.50", False)):
        assert [v.follows for v in judged(text.format(said))] == [follows]


def test_a_rate_is_judged_by_the_time_of_the_training_alone() -> None:
    table = "| GPUs | {} | batch | {} |\n|-|-|-|-|\n| 1 | 100 | 32 | 320 |\n\n"
    table += "Trained on 50,000 images for 10 epochs.\n"
    assert wrong(table.format("time (s)", "samples/s")) == ["3: 320 samples/s"]
    for time in ("step time (s)", "latency (s)", "time per iteration (s)", "first batch after, s"):
        assert judged(table.format(time, "samples/s")) == []
    assert judged(table.format("time (s)", "tokens/s")) == []
    assert judged("The run took < 5 s at 100 samples/s.", Work([1000], [1])) == []


def test_a_stated_number_holds_for_its_own_section() -> None:
    table = "| GPUs | time (s) | images/s |\n|-|-|-|\n| 1 | 100 | 320 |\n"
    stated = "Trained on 2,560 images for 10 epochs.\n"
    assert wrong(f"# One\n\n{stated}\n{table}") == ["7: 320 samples/s"]
    assert judged(f"# One\n\n{stated}\n# Two\n\n{table}") == []
    assert judged(f"# One\n\n{table}\n## Two\n\n{stated}") == []


def test_a_number_beyond_what_a_float_holds_is_not_judged() -> None:
    assert judged(SENTENCES.replace("245", "1e999") + "\n2 GPUs: 1.9x speedup\n") == []
