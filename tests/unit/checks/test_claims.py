"""check-claims: known wrong claims are found, right ones are left alone, the others are named."""

import pytest

from jobkit.analysis.collect.results import collect
from jobkit.analysis.report.tables import proposal_table
from jobkit.checks.claims import Verdict, check, main, number
from support.fake_study import whole_study
from support.refusals import refusal


def judged(text: str) -> list[Verdict]:
    return [v for v in check(text) if v.follows is not None]


def wrong(text: str) -> list[str]:
    return [f"{v.line}: {v.said}" for v in judged(text) if not v.follows]


TABLE = """| GPUs | time (s) | speed-up |
|---:|---:|---:|
| 1 | 480 | 1.0 |
| 2 | 245 | 1.95x |
| 4 | 128 | 3.8x |
| 8 | 68 | **7.6x** |
"""
SERIES = """| Strategy | GPUs | Time | Speedup |
|-|-|-|-|
| DDP | 1 | 100 | 1.0 |
| | 4 | 30 | 3.3 |
| FSDP | 1 | 200 | 1 |
| | 4 | 50 | 4.0 |
"""
LATEX = r"""\begin{tabular}{rrr}
\toprule
GPUs & time (s) & efficiency \\
\midrule
1 & 480 & 100\% \\
8 & 68 & \textbf{95\%} \\
\bottomrule
\end{tabular}
"""


def test_tables_and_numbers_of_many_kinds() -> None:
    for text, found in (
        ("GPUs,s/epoch,speed-up\n1,480,1\n8,68,7.6\n", ["3: 7.6x"]),
        ("GPUs;time;speed-up\n1;3.034,6;1\n4;765,7;3,96\n8;400,0;8,1\n", ["4: 8,1x"]),
        ("GPUs,time,speed-up\n1,60 min,1\n8,900 s,5.1\n", ["3: 5.1x"]),
        ("GPUs,rows/s,speed-up\n1,250k,1\n8,1.8M,7.2\n16,2.5M,12\n", ["4: 12x"]),
        ("ranks\tsamples/s\tefficiency\n1\t1 000\t100 %\n4\t3 000\t75 %\n8\t4000\t60%", ["4: 60%"]),
        ("ranks,throughput,efficiency\n1,1000,1.0\n4,3000,0.85\n", ["3: 0.85 (of 1)"]),
        ("GPUs,images/s/GPU,efficiency\n1,400,100%\n2,390,97.5%\n4,300,95%\n", ["4: 95%"]),
        ("One:\n\nGPUs   time  speed-up\n1      60    1\n4      20    3.5\n", ["5: 3.5x"]),
        (TABLE, ["6: 7.6x"]),  # 480/245 may be 1.953 to 1.965, and 480/68 is at most 7.12
        (LATEX, ["6: 95%"]),
        # What it costs is no time, and the end of an interval no claim.
        ("nodes,time (h),speed-up,node-hours\n1,8.12,1,8.12\n2,4.21,1.93,8.42\n", []),
        ("nodes,time (h),node_hours,speed-up\n1,8.12,8.12,1\n2,4.21,8.42,1.99\n", ["3: 1.99x"]),
        ("GPUs,time_s,time_low_s,speed_up,speed_up_low\n1,9,8,1,1\n2,5,4,1.80,0.1\n", []),
        ("GPUs,time (min),speed-up (95% CI)\n1,60,1\n2,31,1.94 [1.9 to 2.0]\n", []),
        # Weak scaling, and strong.
        ("GPUs,step time (ms),efficiency\n1,200,100%\n2,206,97%\n4,220,91%\n", []),
        ("GPUs,time,efficiency\n1,100,100%\n4,31,80.6%\n", []),
        # Not one row by this and the next by that.
        ("nodes,time (min),speed-up\n1,60,1x\n2,20,5x\n8,9,6.7x\n", ["3: 5x"]),
        # Each series has its own base, and its name stands in its first row.
        (SERIES, []),
        (SERIES.replace("4.0", "3.3"), ["6: 3.3x"]),
        # Which numbers belong together is said by the heads.
        ("GPUs,TF32 img/s,mixed img/s,mixed speed-up\n1,100,240,1\n8,780,1700,7.8\n", ["3: 7.8x"]),
    ):
        assert len(judged(text)) >= 1
        assert wrong(text) == found


@pytest.mark.parametrize("form", ["markdown", "latex"])
def test_our_own_tables_follow(form: str) -> None:
    whole_study(strategies=("ddp",), gpus=(1, 2, 4), repeats=3)
    whole_study(strategies=("ddp",), gpus=(1, 2, 4), settings={"batch_size_per_rank": 128})
    text = getattr(proposal_table(collect("s"), "GPUs"), form)()
    assert len(judged(text)) == 8 and wrong(text) == []


def test_what_is_not_certain_is_not_judged() -> None:
    for text in (
        "GPUs,img/s,speed-up over 64 cores\n1,60,12\n4,200,36\n",  # of something else
        "GPUs,FP32 img/s,mixed img/s,speed-up\n1,100,240,2.4\n8,780,1700,2.18\n",  # of which?
        "GPUs,time,speed-up\n8,20,3\n16,11,5.4\n",  # relative to a run that is not there
        "GPUs,time,speed-up\n1,10,1\n2,n/a,1.9\n4,0-5,5\n",
        "GPUs,time,speed-up\n1,1.5x,1\n2,50 %,1.9\n",
        "It is 4x faster on 8 GPUs, and scales well.",
        "GPUs,time,memory efficiency\n1,10,100%\n2,5,50%\n",
    ):
        assert judged(text) == []


def test_a_number_is_the_interval_of_its_rounding() -> None:
    for text, head, role, low, high in (
        ("1.234,5", "", "", 1234.45, 1234.55),
        ("1,95", "", "", 1.945, 1.955),
        ("12,345", "", "", 12344.5, 12345.5),
        ("6", "t [min]", "time", 330, 390),
    ):
        found = number(text, head, role)
        assert found and (found.low, found.high) == pytest.approx((low, high))
    assert number("A100") is None and number("8192 and 4096") is None


def test_the_command(tmp_path, capsys) -> None:
    file = tmp_path / "claims.md"
    image = f"![](data:image/png;base64,{'x' * 140_000})"
    file.write_text(f"{TABLE}\n| GPUs | speed-up |\n|-|-|\n| 1 | 1 |\n| 2 | 1.0 |\n\n{image}\n")
    assert main([str(file)]) == 4
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "line 6: 7.6x does not follow: 480 / 68 = 7.059x [7, 7.119]"
    assert second.startswith("line 11: 1.0x is not judged: no times or rates")
    assert last.endswith("2 of 3 judged claims follow")
    file.write_text(TABLE.replace("7.6x", "7.1x"))
    assert main([str(file)]) == 0
    capsys.readouterr()
    for content, said in ((b"hello", "nothing to check"), (b"", "nothing"), (b"\xff\xfe", "utf-8")):
        file.write_bytes(content)
        assert said in refusal(main, [str(file)], capsys)
    assert main([str(tmp_path / "absent")]) == 2
