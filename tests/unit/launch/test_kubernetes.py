"""Jobs of Kubernetes for a plan's runs, their options, and the check of the ranks' places."""

from typing import Any

import yaml

from jobkit.checks.check_k8s import check_k8s as check
from jobkit.checks.check_k8s import main as check_k8s
from jobkit.errors import Exit
from jobkit.launch.cli import main as run_benchmarks
from jobkit.launch.kubernetes import (
    TEMPLATE,
    KubernetesOptions,
    manifest,
    object_name,
    read_template,
)
from jobkit.spec.runspec import RunSpec
from jobkit.spec.study import Study
from support.place import ROOT
from support.refusals import refusal

GOLDEN = ROOT / "tests" / "golden" / "scripts" / "kubernetes.yaml"
IMAGE = "registry.example.org/jobkit:1.0"
SPEC = RunSpec(strategy="ddp", nodes=2, ranks_per_node=4)


def made(spec: Any = SPEC, options: Any = None, template: str = "") -> str:
    options = options or KubernetesOptions(image=IMAGE)
    return manifest(template or read_template(TEMPLATE), "train", "study/run", spec, options, 3)


def job_of(text: str) -> dict[str, Any]:
    """The Job, which is the last document of a manifest."""
    return list(yaml.safe_load_all(text))[-1]


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["template"]["spec"]


def test_a_run_of_two_pods_is_a_job_and_its_service() -> None:
    """The manifest compared whole."""
    options = KubernetesOptions(
        image=IMAGE, queue="gpus", gpu_resource="amd.com/gpu",
        resource=("rdma/hca=1", "ephemeral-storage=10Gi"),
        toleration=("nvidia.com/gpu", "dedicated=ml:NoSchedule"),
        annotation=("k8s.v1.cni.cncf.io/networks=rail-0, rail=1", "note="),
    )  # fmt: skip
    assert made(options=options) == GOLDEN.read_text()
    for code in (Exit.USAGE, Exit.AGAIN):
        assert f"operator: In, values: [{int(code)}]}}\n" in GOLDEN.read_text()


def test_one_pod_needs_no_service_and_the_cpu_no_gpu() -> None:
    """And its ranks end before the container is killed; two pods wait longer than restarts do."""
    short = read_template(TEMPLATE).replace("GracePeriodSeconds: 120", "GracePeriodSeconds: 90")
    text = made(RunSpec(strategy="ddp", ranks_per_node=2, device="cpu"), template=short)
    (job,) = yaml.safe_load_all(text)
    (box,) = pod_of(job)["containers"]
    assert "subdomain" not in pod_of(job) and "--nnodes" not in box["args"]
    assert set(box["resources"]["limits"]) == {"memory"}
    assert "tolerations" not in pod_of(job) and not job["spec"]["template"].get("metadata")
    seconds = int(box["args"][box["args"].index("--shutdown-timeout") + 1])
    assert seconds < 90 == pod_of(job)["terminationGracePeriodSeconds"]
    args = pod_of(job_of(made()))["containers"][0]["args"]
    assert int(args[args.index("--start-timeout") + 1]) > 360  # the longest delay of a restart


def test_the_words_of_a_command_arrive_whole() -> None:
    """And a user's $(NAME) is not expanded by the kubelet."""
    odd = ["x=$(HOSTNAME)", 'say "hi" \\ it\'s', "é \U0001f600 \ue000", "", "yes"]
    odd += ["007", "#", "@NAME"]
    (spec,) = Study.of_command(("python", "t.py", *odd), gpus=(1,)).expand().runs.values()
    args = pod_of(job_of(made(spec)))["containers"][0]["args"]
    assert args[-8:] == ["x=$$(HOSTNAME)", *odd[1:]]


def test_a_name_is_a_dns_label_that_leaves_room_for_the_pods_index() -> None:
    pairs = [("strong", "ddp-n1-g2"), ("s" * 60, "a"), ("s" * 60, "b"), ("9 Runs", "É_ü")]
    names = [object_name(*pair) for pair in [*pairs, ("é", "-"), ("-", "_"), ("a" * 49, "")]]
    for name in names:
        assert len(f"{name}-9999") <= 63 and name.isascii() and name == name.lower()
        assert name[0].isalpha() and name[-1].isalnum()
    assert len(set(names)) == len(names)  # also of long ones that begin alike


TO = ["--to", "kubernetes", "--image", IMAGE]


def test_a_study_is_written_as_the_dry_run_shows_it(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path))
    mine = tmp_path / "mine.yaml"
    text = TEMPLATE.read_text().replace("jobkit-runs", "of-the-group").replace(": 120", ": 90  #")
    mine.write_text(text.rstrip(), newline="\r\n")
    words = [*TO, "--gpus", "1", "2x2", "--name", "k", "--toleration", "gpu", "spot"]
    words += ["--template", str(mine)]
    assert run_benchmarks([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "k").exists()
    assert run_benchmarks(words) == 0
    assert "kubectl apply -f" in capsys.readouterr().out
    files = sorted((tmp_path / "k" / "kubernetes").glob("*.yaml"))
    assert len(files) > 1 and all(f.read_text() in shown for f in files)
    jobs = [document for document in yaml.safe_load_all(shown) if document["kind"] == "Job"]
    assert len(jobs) == len(files)
    assert all([t["key"] for t in pod_of(job)["tolerations"]] == ["gpu", "spot"] for job in jobs)
    assert shown.count("claimName: of-the-group") == len(jobs) and "##" not in shown
    assert check_k8s([str(f) for f in files]) == 0


def test_what_does_not_fit_is_one_line(tmp_path, capsys) -> None:
    wrong = {"grace.yaml": ("Seconds: 120", "Seconds: 5"), "name.yaml": ("@NODES", "@PODS")}
    for name, change in wrong.items():
        (tmp_path / name).write_text(TEMPLATE.read_text().replace(*change))
    template = [*TO, "--template"]
    for words, text in [
        (["--image", IMAGE], "is for --to kubernetes"),
        ([*template, str(tmp_path / "none.yaml")], "No such file"),
        ([*template, str(tmp_path / "grace.yaml")], "terminationGracePeriodSeconds: N, 30 or more"),
        ([*template, str(tmp_path / "name.yaml")], "unknown @PODS (known: @NAME, "),
        ([*TO, "--resource", "memory=9Gi"], "it stands in hpc/kubernetes.yaml"),
        (["--to", "kubernetes"], "needs --image"),
        ([*TO, "--resource", "rdma/hca"], "--resource 'rdma/hca': must be as KEY=VALUE"),
        ([*TO, "--site", "local"], "--site"),
        ([*TO, "--strategies", "dp", "--gpus", "1"], "dp drives"),
        ([*TO, "--sbatch", "--nice=1"], "option of Slurm"),
        ([*TO, "--gpus=2x2", "--launcher=once", "--", "true"], "--launcher once on 2 nodes"),
        ([*TO, "--gpus=2", "--", "torchrun", "a.py"], "torchrun starts the ranks itself"),
    ]:
        assert text in refusal(run_benchmarks, ["--dry-run", *words], capsys)


# A Job as tutorials have it: each line of it passes every schema, and it never trains.
TUTORIAL = """
apiVersion: batch/v1
kind: Job
metadata: {name: training}
spec:
  parallelism: 4
  template:
    spec:
      containers:
      - name: trainer
        env:
        - {name: MASTER_ADDR, value: training-master}
        - {name: NODE_RANK, value: "0"}
        - {name: WORLD_SIZE, value: "4"}
        command: [python, train.py]
        resources: {limits: {nvidia.com/gpu: 2}}
"""
RULES = {
    "nothing tells a pod which node it is": ("train.py", "$(JOB_COMPLETION_INDEX)"),
    "0 in every pod": ("NODE_RANK", "EPOCHS"),
    "starts one process for 2 GPUs": ("[python", "[torchrun"),
    "4 pods x 2 GPUs are 8": ('WORLD_SIZE, value: "4"', 'WORLD_SIZE, value: "8"'),
    "no pod is called training-master": ("training-master", "training-0.training"),
}


def test_a_job_whose_pods_become_no_ranks_is_refused_by_each_rule(tmp_path, capsys) -> None:
    for rule, mended in RULES.items():
        assert rule in str(check(TUTORIAL))
        assert rule not in str(check(TUTORIAL.replace(*mended)))
    (tmp_path / "bad.yaml").write_text(TUTORIAL)
    assert check_k8s([str(tmp_path / "bad.yaml")]) == 2
    assert capsys.readouterr().out.count("bad.yaml: error: ") == 5
    for text, said in ("", "has no Job"), ("a: [", "not valid"), ("kind: Job", "is no"):
        assert [said in why for _, why in check(text)] == [True]
