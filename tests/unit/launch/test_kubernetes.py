"""Manifests of a plan's runs, and the check of such manifests."""

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jobkit.errors import UsageError
from jobkit.launch.cli import main as run_benchmarks
from jobkit.launch.kubernetes.check import check
from jobkit.launch.kubernetes.cli import main as check_k8s
from jobkit.launch.kubernetes.manifest import object_name
from jobkit.launch.kubernetes.options import KINDS, KubernetesOptions
from jobkit.spec.plan import Study
from jobkit.spec.runspec import RunSpec
from support.manifests import IMAGE, made, pod_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_what_is_written_passes_the_check(kind: str, nodes: int) -> None:
    documents = made(kind, RunSpec(strategy="ddp", nodes=nodes, ranks_per_node=4), queue="gpus")
    assert check(yaml.safe_dump_all(documents)) == []
    assert documents[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_a_job_passes_the_schema(version: str) -> None:
    import kubernetes_validate as validate

    for document in made():
        validate.validate(document, version, strict=True)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_custom_resource_has_the_fields_of_its_api(kind: str) -> None:
    from kubeflow_trainer_api import models

    (document,) = made(kind, queue="gpus")
    # These models take a quantity for a mapping, so that resources are left out.
    name = {"jobset": "JobsetV1alpha2JobSet", "trainjob": "TrainerV1alpha1TrainJob"}[kind]
    if kind == "trainjob":
        del document["spec"]["trainer"]["resourcesPerNode"]
        shm = document["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
        pod = shm["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    else:
        pod = pod_of(document)
        del pod["containers"][0]["resources"]
    del pod["volumes"][0]["emptyDir"]["sizeLimit"]
    read = getattr(models, name).from_dict(document)
    # A key that the model does not know would be lost.
    assert json.loads(read.to_json()) == document


def test_a_pod_runs_as_nobody_special_without_a_secret() -> None:
    pod = pod_of(made()[-1])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    box = pod["containers"][0]
    assert box["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    names = {"HOME", "USER", "JOBKIT_LOGS", "JOBKIT_DATA_DIR", "JOBKIT_POD"}
    assert {v["name"] for v in box["env"]} == names


def test_the_ranks_know_their_place_and_are_ended_before_the_pod() -> None:
    words = pod_of(made(grace_s=90)[-1])["containers"][0]["args"]
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    assert pairs["--nnodes"] == "2" and pairs["--nproc-per-node"] == "4"
    assert pairs["--node-rank"] == "$(JOB_COMPLETION_INDEX)"
    assert pairs["--master-addr"] == "train-0.train"
    assert int(pairs["--shutdown-timeout"]) < 90
    assert int(pairs["--start-timeout"]) > 360  # the longest delay of the controller's restarts


@pytest.mark.parametrize(("device", "gpus"), [("auto", ["4"]), ("cuda", ["4"]), ("cpu", [])])
def test_a_training_on_the_cpu_asks_for_no_gpu(device: str, gpus: list[str]) -> None:
    job = made(spec=RunSpec(strategy="ddp", ranks_per_node=4, device=device))[-1]
    limits = pod_of(job)["containers"][0]["resources"]["limits"]
    assert [count for name, count in limits.items() if "/gpu" in name] == gpus


def test_one_pod_needs_no_service() -> None:
    (job,) = made(spec=RunSpec(strategy="ddp", ranks_per_node=2))
    assert "subdomain" not in pod_of(job) and "--nnodes" not in pod_of(job)["containers"][0]["args"]


def test_a_users_dollar_is_not_expanded_by_the_kubelet() -> None:
    study = Study.of_command(("python", "train.py", "--tag=$(HOSTNAME)"), gpus=(1,))
    (spec,) = study.expand().runs.values()
    assert "--tag=$$(HOSTNAME)" in pod_of(made(spec=spec)[-1])["containers"][0]["args"]


@given(st.text(max_size=120), st.text(max_size=120))
def test_a_name_is_a_dns_label_that_leaves_room(study: str, run_id: str) -> None:
    name = object_name(study, run_id)
    assert len(f"{name}-node-0-9999") <= 63
    assert name.isascii() and name[0].isalpha() and name[-1].isalnum() and name == name.lower()


def test_long_names_that_begin_alike_differ() -> None:
    assert object_name("s" * 60, "a") != object_name("s" * 60, "b")


GOOD = {"image": IMAGE}


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({}, "--image"),
        (GOOD | {"image": "a b"}, "blanks"),
        (GOOD | {"queue": "Two Words"}, "--queue"),
        (GOOD | {"volume_claim": ""}, "--volume-claim"),
        (GOOD | {"pod_memory": "lots"}, "--pod-memory"),
        (GOOD | {"pod_memory": "64K"}, "--pod-memory"),
        (GOOD | {"pod_memory": "8Gi"}, "--shm-size 8Gi: /dev/shm counts"),
        (GOOD | {"pod_memory": "9G", "shm_size": "0.01Ti"}, "--pod-memory 9G"),
        (GOOD | {"gpu_resource": "gpu"}, "--gpu-resource"),
        (GOOD | {"grace_s": 5}, "grace_s"),
        (GOOD | {"kind": "pod"}, "kind"),
    ],
)
def test_a_bad_option_is_one_line(given: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        KubernetesOptions(**given)


def test_a_study_is_written_as_the_dry_run_shows_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path))
    words = ["--to", "kubernetes", "--image", IMAGE, "--gpus", "1", "2x2", "--name", "k"]
    assert run_benchmarks([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "k").exists()
    assert run_benchmarks(words) == 0
    assert "kubectl apply -f" in capsys.readouterr().out
    files = sorted((tmp_path / "k" / "kubernetes").glob("*.yaml"))
    plan = json.loads((tmp_path / "k" / "plan.json").read_text())
    assert [f.stem for f in files] == sorted(r["run_id"] for r in plan["runs"])
    assert all(f.read_text() in shown for f in files)
    assert check_k8s([str(f) for f in files]) == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--image", IMAGE], "is for --to kubernetes"),
        (["--to", "kubernetes"], "needs --image"),
        (["--to", "kubernetes", "--image", IMAGE, "--site", "local"], "--site"),
        (
            ["--to", "kubernetes", "--image", IMAGE, "--strategies", "dp", "--gpus", "1"],
            "dp drives",
        ),
        (["--to", "kubernetes", "--image", IMAGE, "--sbatch", "--nice=1"], "option of Slurm"),
        (["--to", "kubernetes", "--image", IMAGE, "--gpu-request", "none"], "--gpu-request"),
        (
            ["--to", "kubernetes", "--image", IMAGE, "--kind", "trainjob", "--max-restarts", "1"],
            "--max-restarts: a TrainJob",
        ),
        (
            ["--to=kubernetes", "--image", IMAGE, "--gpus=2x2", "--launcher=once", "--", "true"],
            "--launcher once on 2 nodes",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_benchmarks(["--dry-run", *words]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_pods_are_told_which_counters_of_energy_to_read(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--to=kubernetes", "--image", IMAGE, "--kind", kind, "--gpus", "1", "--dry-run"]
    monkeypatch.setenv("JOBKIT_ENERGY", "joules")
    assert run_benchmarks(words) == 2
    assert "no counter of energy is called 'joules'" in capsys.readouterr().err
    monkeypatch.setenv("JOBKIT_ENERGY", "nvml,rapl")
    assert run_benchmarks(words) == 0
    text = capsys.readouterr().out
    assert text.count("name: JOBKIT_ENERGY") == text.count("name: JOBKIT_POD") > 0
    assert text.count("value: nvml,rapl") == text.count("name: JOBKIT_POD")


def test_the_sizes_are_the_studys_and_not_those_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    words = ["--to", "kubernetes", "--image", IMAGE, "--strategies", "ddp", "--repeats", "1"]
    assert run_benchmarks([*words, "--dry-run"]) == 0
    jobs = list(yaml.safe_load_all(capsys.readouterr().out))
    ranks = {pod_of(job)["containers"][0]["args"][1] for job in jobs}
    assert ranks == {"1", "2", "4", "8"}
