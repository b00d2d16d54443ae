"""check-claims: known wrong claims are found, and right ones are left alone."""

import pytest

from jobkit.analysis.claims.cli import Work, check, main
from jobkit.errors import UsageError


def wrong(text: str, **work) -> list[str]:
    return [v.line() for v in check(text, Work(**work)) if not v.follows]


HEADLINE = """
| GPUs | time (s) | speed-up |
|---:|---:|---:|
| 1 | 480 | 1.0 |
| 2 | 245 | 1.95x |
| 4 | 128 | 3.8x |
| 8 | 68 | **7.6x** |
"""


def test_a_headline_that_is_better_than_its_table() -> None:
    """480/245/128/68 s give 1.96, 3.75 and 7.06; 3.75 is 3.8 to one digit, the others are off."""
    assert wrong(HEADLINE) == [
        "table 1, 2 GPUs: speed-up 1.95x claimed; 480 / 245 = 1.96x",
        "table 1, 8 GPUs: speed-up 7.6x claimed; 480 / 68 = 7.06x",
    ]


def test_seconds_per_epoch_are_a_time() -> None:
    (line,) = wrong("GPUs,s/epoch,speed-up\n1,480,1\n8,68,7.6\n")
    assert line.endswith("speed-up 7.6x claimed; 480 / 68 = 7.06x")


def test_the_same_headline_as_a_sentence() -> None:
    table = "| GPUs | seconds |\n|--|--|\n| 1 | 480 |\n| 2 | 245 |\n| 4 | 128 |\n| 8 | 68 |\n"
    lines = wrong(f"We reach 1.95/3.8/7.6x.\n\n{table}")
    assert [line.partition(":")[0] for line in lines] == ["text, 2 GPUs", "text, 8 GPUs"]
    assert lines[1].endswith("480 / 68 = 7.06x")


def test_a_list_may_begin_with_the_smallest_size() -> None:
    table = "| GPUs | seconds |\n|--|--|\n| 1 | 480 |\n| 2 | 240 |\n| 4 | 128 |\n"
    assert wrong(f"Speed-ups: 1/2/3.75x\n\n{table}") == []
    assert wrong(f"Speed-ups: 1/2/4.0x\n\n{table}") == [
        "text, 4 GPUs: speed-up 4.0x claimed; 480 / 128 = 3.75x"
    ]


NODES = """
nodes,GPUs,wall time [s],parallel efficiency
1,8,850,100%
2,16,440,96.6%
4,32,230,85.2%
"""


def test_an_efficiency_that_is_relative_to_something_else() -> None:
    assert wrong(NODES) == [
        "table 1, 32 GPUs: efficiency 85.2 % claimed; 850 / 230 / 4 (relative to 8 GPUs) = 92.4 %"
    ]
    share = NODES.replace("100%", "1.00").replace("96.6%", "0.97").replace("85.2%", "0.852")
    assert len(wrong(share)) == 1


def test_the_same_efficiency_as_a_sentence() -> None:
    table = "\n".join(f"| {row.replace(',', ' | ')} |" for row in NODES.strip().splitlines())
    head, *rows = table.replace("| parallel efficiency ", "").splitlines()
    rows = [row.rpartition("| ")[0] for row in rows]
    text = "\n".join(["Efficiency is 85.2 % at 32 GPUs.", "", head, "|--|--|--|", *rows])
    (line,) = wrong(text)
    assert line.startswith("text, 32 GPUs: efficiency 85.2 % claimed")
    assert line.endswith("= 92.4 %")


RATE = 'GPUs,time_s,samples_per_s\n8,70,"{}"\n'


def test_a_rate_that_the_time_does_not_give() -> None:
    (line,) = wrong(RATE.format("2,840"), samples=16000, epochs=10)
    assert line.endswith("16,000 samples x 10 epochs / 70 = 2,286 samples/s")
    assert wrong(RATE.format("2,286"), samples=16000, epochs=10) == []


def test_samples_and_epochs_from_the_text_or_from_columns() -> None:
    text = "We train 16,000 samples for 10 epochs.\n\n| GPUs | time | samples/s |\n|-|-|-|\n"
    assert len(wrong(text + "| 8 | 70 s | 2,840 |\n")) == 1
    assert wrong(text + "| 8 | 70 s | 2,286 |\n") == []
    assert len(wrong("GPUs,samples,epochs,time,samples/s\n8,16000,10,70,2840\n")) == 1
    assert wrong("GPUs,samples,time per epoch (s),samples/s\n8,16000,7.0,2286\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "GPUs,time (min),speed-up\n1,60,1\n4,20,3\n",
        "GPUs;time;speed-up\n1;60 min;1\n4;0:20:00;3\n",
        "ranks\tsamples/s\tefficiency\n1\t1,000\t100 %\n4\t3,000\t75 %\n",
        "ranks,throughput,efficiency\n1,1000,1.0\n4,3000,0.75\n",
        "nodes,speed-up,efficiency\n1,1,1\n4,3,0.75\n",
        "# a remark, with a comma\nGPUs,time (s),speed-up\n1,60.0,1\n4,20.0,3.00\n",
        "GPUs,time (s),speed-up\n4,20,3.00\n1,60,1.00\n",
    ],
)
def test_what_follows_is_left_alone(text: str) -> None:
    assert check(text)
    assert wrong(text) == []
    assert len(wrong(text.replace("75", "99").replace(",3", ",9").replace(";3", ";9"))) > 0


def test_weak_scaling_is_judged_as_such() -> None:
    text = "GPUs,time (s),efficiency\n1,100,100%\n4,125,80%\n"
    assert wrong(text, weak=True) == []
    assert len(wrong(text)) == 1


def test_memory_and_cost_are_no_times() -> None:
    text = "GPUs,GPU-hours,time (s),speed-up\n1,99,60,1\n4,1,20,3\n"
    assert wrong(text) == []


def test_the_command(tmp_path, capsys) -> None:
    file = tmp_path / "claims.md"
    file.write_text(HEADLINE)
    assert main([str(file)]) == 4
    said = capsys.readouterr().out
    assert said.count("does not follow: ") == 2
    assert said.endswith("2 of 4 claims follow\n")
    file.write_text(HEADLINE.replace("1.95x", "1.96x").replace("7.6x", "7.1x"))
    assert main([str(file)]) == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"hello", "no table"),
        (b"", "no table"),
        (b"GPUs,time\n1,10\n", "nothing to check"),
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


def test_a_table_without_a_number_where_one_belongs_is_skipped() -> None:
    with pytest.raises(UsageError):
        check("GPUs,time,speed-up\nfour,fast,great\n")
    assert wrong("GPUs,time,speed-up\n1,10,1\n2,n/a,1.9\n4,0,5\n") == []
