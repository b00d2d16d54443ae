"""check-k8s: each rule finds its mistake, and nothing ends the check."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jobkit.launch.kubernetes.check import check
from jobkit.launch.kubernetes.cli import main as check_k8s
from support.manifests import made, said

Edit = Callable[[dict[str, Any]], Any]


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


@settings(deadline=None)  # a busy machine is no mistake
@given(st.sampled_from(["Job", "JobSet", "TrainJob", "Service", 7, None]), VALUES, VALUES)
def test_no_document_ends_the_check(kind: Any, spec: Any, metadata: Any) -> None:
    text = yaml.safe_dump({"kind": kind, "spec": spec, "metadata": metadata}, allow_unicode=True)
    assert isinstance(check(text), list)


@pytest.mark.parametrize(
    "text", ["", "a: [", "- 1\n- 2", "kind: Pod", "\t", "a: &x [*x]", "[" * 5000]
)
def test_what_is_no_manifest_is_one_error(text: str) -> None:
    assert next(f.severity for f in check(text)) == "error"


def test_the_command_ends_with_2_for_an_error(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(TUTORIAL)
    assert check_k8s([str(file), "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)) >= 14
    assert check_k8s([str(tmp_path / "none.yaml")]) == 2
