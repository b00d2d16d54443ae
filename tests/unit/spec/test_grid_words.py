"""--sweep of a command line: what it plans, and what is refused."""

import pytest

from jobkit.errors import UsageError
from jobkit.launch import cli
from jobkit.spec.options import with_words
from jobkit.spec.study import Study

TRAINING = Study(
    name="t", strategies=("ddp",), gpus=(1,), settings={"batch_size_per_rank": 8, "lr": 0.1},
    sweep={"width": (1, 2)},
)  # fmt: skip
COMMAND = Study(
    name="c", command=("python", "train.py", "--b={batch}", "--a={steps}"), gpus=(1,),
    parameters={"batch": 3, "steps": "{40 // ranks}"}, sweep={"batch": (6, 12)},
)  # fmt: skip


def test_settings_get_their_type_and_are_added_to_the_sweep_of_the_file() -> None:
    words = ["lr=0.1,1", "augment=true,false", "global-batch-size=64,128"]
    made = with_words(TRAINING, words)
    added = {"lr": (0.1, 1.0), "augment": (True, False), "global_batch_size": (64, 128)}
    assert made.sweep == {"width": (1, 2), **added}
    assert made.settings == {}  # swept settings, and the batch size of the other kind
    assert len(made.expand().runs) == 16
    assert with_words(TRAINING, ["width=3"]).sweep == {"width": (3,)}
    assert with_words(TRAINING, []) == TRAINING


def test_parameters_are_numbers_texts_or_formulas_as_in_a_file() -> None:
    made = with_words(COMMAND, ["steps={8 * ranks},1e-3,true,a b,-2", "batch=7"])
    assert made.sweep == {"batch": (7,), "steps": ("{8 * ranks}", 1e-3, True, "a b", -2)}
    runs = made.expand().runs.values()
    assert {s.command[2] for s in runs} == {"--b=7"}
    assert {s.command[3] for s in runs} == {"--a=8", "--a=0.001", "--a=True", "--a=a b", "--a=-2"}


REFUSED = [
    (TRAINING, ["lr"], "--sweep 'lr': must be NAME=V1,V2"),
    (TRAINING, ["lr=0.1,,1"], "--sweep lr=0.1,,1: has an empty value"),
    (TRAINING, ["batch-size-per-rank=1", "batch_size_per_rank=2"], "given twice"),
    (TRAINING, ["precison=fp32"], "did you mean 'precision'"),
    (TRAINING, ["width=1,two"], "width = 'two': must be a whole number"),
    (TRAINING, ["augment=yes"], "must be true or false"),
    (TRAINING, ["repeat=1,2"], "use strategies, gpus, repeats"),
    (COMMAND, ["batch=8,16,"], "has an empty value"),
    (COMMAND, ["bach=1"], "no {bach} in the command; did you mean 'batch'"),
]


def test_what_is_refused() -> None:
    for study, words, said in REFUSED:
        with pytest.raises(UsageError) as caught:
            with_words(study, words).expand()
        assert said in str(caught.value)


@pytest.mark.parametrize("command", [(), ("--", "python", "-c0", "{precision}", "{batch}")])
def test_one_sweep_takes_several_words(command, capsys) -> None:
    """What follows the words, an option or -- and a command, is still what it was."""
    strategies = [] if command else ["--strategies", "ddp"]
    swept = ["precision=fp32,bf16", f"{'batch' if command else 'batch_size_per_rank'}=64,128"]
    options = ["--gpus", "1", "--repeats", "1", "--site", "local", "--dry-run"]
    assert cli.main([*strategies, *options, "--sweep", *swept, *command]) == 0
    assert "# 4 of 4 runs" in capsys.readouterr().out


def test_a_setting_given_twice_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--lr", "1", "--sweep", "lr=1,2", "--site", "local", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "lr: give --lr or --sweep, not both" in error and error.count("\n") == 1
