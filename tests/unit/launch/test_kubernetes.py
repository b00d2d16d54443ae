"""Manifests of a plan's runs, and the check of such manifests."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jobkit.errors import UsageError
from jobkit.launch.cli import main as run_benchmarks
from jobkit.launch.kubernetes.check import check
from jobkit.launch.kubernetes.cli import main as check_k8s
from jobkit.launch.kubernetes.manifest import manifests, object_name
from jobkit.launch.kubernetes.options import KINDS, KubernetesOptions
from jobkit.spec.plan import Study
from jobkit.spec.runspec import RunSpec

IMAGE = "registry.example.org/jobkit:1.0"
SPEC = RunSpec(strategy="ddp", nodes=2, ranks_per_node=4)
Edit = Callable[[dict[str, Any]], Any]


def made(kind: str = "job", spec: Any = SPEC, **given: Any) -> list[dict[str, Any]]:
    options = KubernetesOptions(image=IMAGE, kind=kind, **given)
    return copy.deepcopy(manifests("train", "study/run", spec, options, 3))


def said(documents: list[dict[str, Any]], severity: str = "error") -> str:
    found = check(yaml.safe_dump_all(documents))
    return "\n".join(f"{f.key}: {f.message}" for f in found if f.severity == severity)


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    if document["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec["template"]["spec"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_what_is_written_passes_the_check(kind: str, nodes: int) -> None:
    documents = made(kind, RunSpec(strategy="ddp", nodes=nodes, ranks_per_node=4), queue="gpus")
    assert check(yaml.safe_dump_all(documents)) == []
    assert documents[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_a_job_passes_the_schema(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in made():
        validate.validate(document, version, strict=True)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_custom_resource_has_the_fields_of_its_api(kind: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
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
    assert {v["name"] for v in box["env"]} == {"HOME", "USER", "JOBKIT_LOGS", "JOBKIT_DATA_DIR"}


def test_the_ranks_know_their_place_and_are_ended_before_the_pod() -> None:
    words = pod_of(made(grace_s=90)[-1])["containers"][0]["args"]
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    assert pairs["--nnodes"] == "2" and pairs["--nproc-per-node"] == "4"
    assert pairs["--node-rank"] == "$(JOB_COMPLETION_INDEX)"
    assert pairs["--master-addr"] == "train-0.train"
    assert int(pairs["--shutdown-timeout"]) < 90


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
        (GOOD | {"gpu_resource": "gpu"}, "--gpu-resource"),
        (GOOD | {"grace_s": 5}, "grace_s"),
        (GOOD | {"kind": "pod"}, "kind"),
    ],
)
def test_a_bad_option_is_one_line(given: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        KubernetesOptions(**given)


def job(edit: Edit) -> list[dict[str, Any]]:
    documents = made()
    edit(documents[-1]["spec"])
    return documents


def box(edit: Edit) -> list[dict[str, Any]]:
    return job(lambda spec: edit(spec["template"]["spec"]["containers"][0]))


def service(edit: Edit) -> list[dict[str, Any]]:
    documents = made()
    edit(documents[0])
    return documents


def env(name: str, value: str) -> list[dict[str, Any]]:
    return box(lambda b: b["env"].append({"name": name, "value": value}))


def pod(**changed: Any) -> list[dict[str, Any]]:
    return job(lambda spec: spec["template"]["spec"].update(changed))


ERRORS = {
    "mode": (lambda: job(lambda s: s.pop("completionMode")), "which node it is"),
    "misspelt mode": (lambda: job(lambda s: s.update(completionMode="Indexd")), "must be Indexed"),
    "no completions": (lambda: job(lambda s: s.pop("completions")), "Indexed needs it"),
    "fewer at once": (lambda: job(lambda s: s.update(completions=4)), "must be equal"),
    "restart policy": (lambda: pod(restartPolicy="Always"), "Never or OnFailure"),
    "rules need Never": (lambda: pod(restartPolicy="OnFailure"), "needs restartPolicy: Never"),
    "per index": (lambda: job(lambda s: s.update(backoffLimitPerIndex=1)), "work alone"),
    "another container": (lambda: box(lambda b: b.update(name="main")), "no container 'train'"),
    "no containers": (lambda: pod(containers=[]), "needs a container"),
    "no subdomain": (lambda: pod(subdomain="other"), "no headless Service"),
    "virtual IP": (lambda: service(lambda s: s["spec"].pop("clusterIP")), "must be None"),
    "only ready": (
        lambda: service(lambda s: s["spec"].pop("publishNotReadyAddresses")),
        "before readiness",
    ),
    "wrong selector": (
        lambda: service(lambda s: s["spec"].update(selector={"job-name": "other"})),
        "selects other",
    ),
    "no selector": (lambda: service(lambda s: s["spec"].pop("selector")), "missing: batch"),
    "half a GPU": (
        lambda: box(lambda b: b["resources"]["limits"].update({"nvidia.com/gpu": "0.5"})),
        "whole number",
    ),
    "GPU in words": (
        lambda: box(lambda b: b["resources"]["limits"].update({"nvidia.com/gpu": "two"})),
        "whole number",
    ),
    "GPU as a request": (
        lambda: box(lambda b: b["resources"]["requests"].update({"amd.com/gpu": "2"})),
        "give limits.amd.com/gpu",
    ),
    "secret": (lambda: env("HF_TOKEN", "hf_1"), "secretKeyRef"),
    "same rank": (lambda: env("NODE_RANK", "0"), "in every pod"),
    "no place": (lambda: box(lambda b: b.update(args=["--x"])), "which node it is"),
    "one process": (
        lambda: box(lambda b: b.update(command=["python", "$(JOB_COMPLETION_INDEX)"], args=[])),
        "--nproc-per-node=4",
    ),
    "first pod": (lambda: env("MASTER_ADDR", "train-master"), "write train-0.train"),
    "killed first": (lambda: pod(terminationGracePeriodSeconds=100), "not below the grace"),
    "no such volume": (lambda: pod(volumes=[]), "no volume 'shm'"),
    "all of it shared memory": (
        lambda: box(lambda b: b["resources"]["limits"].update(memory="4Gi")),
        "as large",
    ),
    "api": (lambda: [{**d, "apiVersion": "batch/v1beta1"} for d in made()[1:]], "it is batch/v1"),
    "name": (lambda: [made()[0], {**made()[1], "metadata": {"name": "Train_1"}}], "lower-case"),
    "runtime": (
        lambda: [{**d, "spec": {**d["spec"], "runtimeRef": {}}} for d in made("trainjob")],
        "write torch-distributed",
    ),
    "nodes": (
        lambda: [
            {**d, "spec": {**d["spec"], "trainer": {**d["spec"]["trainer"], "numNodes": "2"}}}
            for d in made("trainjob")
        ],
        "spec.trainer.numNodes",
    ),
    "names of a JobSet": (
        lambda: [
            {**d, "spec": {**d["spec"], "network": {"enableDNSHostnames": False}}}
            for d in made("jobset")
        ],
        "pods have no names",
    ),
}  # fmt: skip
WARNINGS = {
    "grace": (lambda: pod(terminationGracePeriodSeconds=None), "30 s from SIGTERM"),
    "latest": (lambda: box(lambda b: b.update(image="jobkit:latest")), "may change"),
    "no tag": (lambda: box(lambda b: b.update(image="host:5000/jobkit")), "may change"),
    "shell": (lambda: box(lambda b: b.update(command=["sh", "-c", "torchrun t.py"])), "write exec"),
    "root": (lambda: pod(securityContext={}), "runAsNonRoot"),
    "shm": (lambda: box(lambda b: b["volumeMounts"].pop(0)), "64 MiB"),
    "shm on a disk": (
        lambda: pod(volumes=[{"name": "shm", "emptyDir": {}}, {"name": "runs"}]),
        "medium: Memory",
    ),
    "nothing stays": (lambda: box(lambda b: b["volumeMounts"].pop(1)), "end with the pod"),
    "replacement": (lambda: job(lambda s: s.pop("podReplacementPolicy")), "same index"),
    "backoff": (lambda: job(lambda s: s.update(backoffLimit=1)), "counts pods"),
    "torchrun's own": (
        lambda: box(lambda b: b.update(command=["torchrun"], args=["$(JOB_COMPLETION_INDEX)"])),
        "kills the ranks after 30 s",
    ),
    "size": (lambda: env("WORLD_SIZE", "8"), "the launcher sets it"),
    "JobSet ends": (
        lambda: [{**d, "spec": {**d["spec"], "failurePolicy": {}}} for d in made("jobset")],
        "ends the training",
    ),
    "former operator": (
        lambda: [*made(), {"kind": "PyTorchJob", "apiVersion": "kubeflow.org/v1"}],
        "use a TrainJob",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_each_rule_finds_its_error(case: str) -> None:
    make, words = ERRORS[case]
    assert words in said(make())


@pytest.mark.parametrize("case", WARNINGS)
def test_each_rule_gives_its_warning(case: str) -> None:
    make, words = WARNINGS[case]
    assert words in said(make(), "warning")
    assert said(make(), "error") == ""


# A manifest as tutorials have it: each line of it passes every schema, and it never trains.
TUTORIAL = """
apiVersion: batch/v1
kind: Job
metadata:
  name: distributed-training
spec:
  parallelism: 4
  template:
    spec:
      containers:
      - name: trainer
        image: net:latest
        env:
        - {name: MASTER_ADDR, value: distributed-training-master}
        - {name: MASTER_PORT, value: "29500"}
        - {name: WORLD_SIZE, value: "4"}
        command: ["python", "train.py"]
        resources: {limits: {nvidia.com/gpu: 2}}
"""


def test_a_tutorials_manifest_is_refused_for_each_reason() -> None:
    found = check(TUTORIAL)
    errors = "\n".join(f.message for f in found if f.severity == "error")
    for words in (
        "completionMode: Indexed",
        "must be equal",
        "missing, which means Always",
        "no headless Service",
        "nothing tells a pod",
        "starts one process for 2 GPUs",
        "4 pods x 2 GPUs are 8",
        "no pod is called distributed-training-master",
    ):
        assert words in errors
    assert sum(f.severity == "warning" for f in found) == 6


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["spec", "template", "containers", "name", "env", "limits", "resources", "volumes",
             "parallelism", "completions", "trainer", "replicatedJobs", "metadata", "selector"]
        ),
        inner, max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@given(st.sampled_from(["Job", "JobSet", "TrainJob", "Service", 7, None]), VALUES, VALUES)
def test_no_document_ends_the_check(kind: Any, spec: Any, metadata: Any) -> None:
    text = yaml.safe_dump({"kind": kind, "spec": spec, "metadata": metadata}, allow_unicode=True)
    assert isinstance(check(text), list)


@pytest.mark.parametrize(
    "text", ["", "a: [", "- 1\n- 2", "kind: Pod", "\t", "a: &x [*x]", "[" * 5000]
)
def test_what_is_no_manifest_is_one_error(text: str) -> None:
    assert next(f.severity for f in check(text)) == "error"


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
        (["--to", "kubernetes", "--image", IMAGE, "--sbatch", "--nice=1"], "option of Slurm"),
    ],
)
def test_what_does_not_fit_is_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_benchmarks([*words, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_the_command_ends_with_2_for_an_error(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(TUTORIAL)
    assert check_k8s([str(file), "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)) >= 14
    assert check_k8s([str(tmp_path / "none.yaml")]) == 2
