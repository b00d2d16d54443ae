"""--spec: settings from a file by hand, in YAML, and what is refused there."""

from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.payload.main import parser, read_settings
from jobkit.spec.plan import STUDIES, Study
from jobkit.spec.spec_file import read_spec_file

pytest.importorskip("yaml")


def written(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text)
    return path


def test_settings_of_a_yaml_file_and_options_over_them(tmp_path: Path) -> None:
    text = (
        "epochs: 3  # passes\noptimizer: adam\nlr: 1e-3\naugment: false\nmodel: mlp\nhidden: 256\n"
    )
    args = parser().parse_args(["--spec", str(written(tmp_path, text)), "--epochs", "7"])
    spec, ranks = read_settings(args)
    assert (spec.epochs, spec.optimizer, spec.lr, spec.augment) == (7, "adam", 0.001, False)
    assert (spec.model, spec.hidden, ranks) == ("mlp", 256, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "unknown setting 'epoch'; did you mean 'epochs'?"),
        ("- epochs", "must be lines such as 'epochs: 3'"),
        ("", "must be lines such as 'epochs: 3'"),
        ("epochs: [1, 2]", "epochs: must be one value, not a list or a table"),
        ("epochs: {a: 1}", "epochs: must be one value"),
        ("epochs: 3\n  lr: 1", "not valid YAML: "),
        ("a: &a [x]\nb: &b [*a, *a]", "a: must be one value"),
        ("epochs: !!python/object/apply:os.system ['true']", "not valid YAML: "),
        ("[" * 20_000, "not valid YAML: "),
        ("#" * (65 << 10), "larger than"),
    ],
)
def test_a_yaml_file_that_cannot_be_used_is_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_spec_file(path)
    said = str(caught.value)
    assert said.startswith(f"--spec {path}: ") and message in said and "\n" not in said


def test_without_its_library_a_yaml_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(UsageError, match="pip install pyyaml"):
        read_spec_file(written(tmp_path, "epochs: 3"))


PRESETS = {"high-performance": (8, 32), "memory-efficient": (2, 128), "single-process": (1, 256)}


@pytest.mark.parametrize("name", sorted(p.stem for p in STUDIES.glob("*.toml")))
def test_every_study_of_the_project_expands(name: str) -> None:
    plan = Study.load(name).expand()
    assert plan.study.name == name and plan.study.description
    if name in PRESETS:
        (spec,) = plan.runs.values()
        assert (spec.world_size, spec.batch_size_per_rank) == PRESETS[name]
