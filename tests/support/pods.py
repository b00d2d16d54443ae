"""Plays the pods of an Indexed Job on this machine: a simulation of what its controllers do.

Done as the Job controller and the kubelet do it: one pod per index with its completion index, host
name and $(NAME) expansion, names of all pods in /etc/hosts (the headless Service), volumes as
mounts, SIGTERM and after the grace period SIGKILL, podFailurePolicy, backoffLimit, and
podReplacementPolicy: Failed. Not done: images, users, limits, scheduling, networks of their own.
Needs root, for a mount and a UTS namespace of each pod.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# In the pod: its names and volumes, then the container's own command as process of this shell.
_ENTER = (
    'mount --bind "$1" /etc/hosts && mount --bind "$2" "$3" && hostname "$4" && '
    'shift 4 && exec "$@"'
)


@dataclass
class PlayedJob:
    """One Indexed Job with its Service.

    image: environment variables that the image sets. volume: the folder that the claim stands for.
    logs: one file per pod, numbered as pods are made.
    """

    documents: list[dict[str, Any]]
    image: Mapping[str, str]
    volume: Path
    logs: Path
    failed: int = 0  # pods that count against backoffLimit
    ended: str = ""  # Complete or Failed
    codes: list[tuple[int, int]] = field(default_factory=list)  # (index, exit code) of each pod
    _pods: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _made: int = 0

    def __post_init__(self) -> None:
        by_kind = {d["kind"]: d for d in self.documents}
        self.name = by_kind["Job"]["metadata"]["name"]
        self.job = by_kind["Job"]["spec"]
        self.pod = self.job["template"]["spec"]
        assert self.job["completionMode"] == "Indexed"
        assert by_kind["Service"]["metadata"]["name"] == self.pod["subdomain"]
        (claim,) = (v["name"] for v in self.pod["volumes"] if "persistentVolumeClaim" in v)
        (self.box,) = self.pod["containers"]
        (self.mount,) = (m["mountPath"] for m in self.box["volumeMounts"] if m["name"] == claim)
        names = [f"{self.name}-{i}" for i in range(self.job["completions"])]
        self.hosts = self.logs / "hosts"
        self.hosts.write_text(
            "127.0.0.1 localhost\n"
            + "".join(
                f"127.0.0.{i + 2} {name}.{self.pod['subdomain']} {name}\n"
                for i, name in enumerate(names)
            )
        )

    def start(self) -> None:
        """Make all pods."""
        for index in range(self.job["completions"]):
            self._make(index)

    def delete(self, index: int) -> None:
        """What `kubectl delete pod` does: the container's process gets SIGTERM."""
        self._pods[index].send_signal(signal.SIGTERM)

    def run(self, limit_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Act as the controller to the Job's end, or until a condition holds: then True."""
        end = time.monotonic() + limit_s
        while not self.ended and time.monotonic() < end:
            if until():
                return True
            for index, process in list(self._pods.items()):
                if (code := process.poll()) is not None:
                    del self._pods[index]
                    self._conclude(index, code if code >= 0 else 128 - code)
            time.sleep(0.05)
        return False

    def stop(self) -> None:
        """End what is left."""
        for process in self._pods.values():
            process.kill()
            process.wait()

    def log(self) -> str:
        """What all pods printed."""
        return "".join(f.read_text() for f in sorted(self.logs.glob("pod-*.log")))

    def _make(self, index: int) -> None:
        env = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{self.name}-{index}"}
        env |= {v["name"]: _expanded(v["value"], env) for v in self.box.get("env", [])}
        words = [_expanded(w, env) for w in (*self.box["command"], *self.box["args"])]
        enter = ["unshare", "--mount", "--uts", "sh", "-c", _ENTER, "pod"]
        place = [str(self.hosts), str(self.volume), self.mount, f"{self.name}-{index}"]
        with (self.logs / f"pod-{self._made}-{index}.log").open("wb") as log:
            self._pods[index] = subprocess.Popen(
                [*enter, *place, *words],
                env={**self.image, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                start_new_session=True,
            )
        self._made += 1

    def _conclude(self, index: int, code: int) -> None:
        """What follows from a pod's exit code."""
        self.codes.append((index, code))
        if code == 0:
            self._done.add(index)
            if len(self._done) == self.job["completions"]:
                self.ended = "Complete"
            return
        action = next(
            (
                rule["action"]
                for rule in self.job["podFailurePolicy"]["rules"]
                if code in rule.get("onExitCodes", {}).get("values", ())
            ),
            "Count",
        )
        self.failed += action == "Count"
        if action == "FailJob" or self.failed > self.job["backoffLimit"]:
            self.ended = "Failed"
            for process in self._pods.values():
                process.send_signal(signal.SIGTERM)
            return
        self._make(index)


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """$(NAME) as the kubelet expands it; $$(NAME) is $(NAME), and an unknown name stays."""
    return re.sub(
        r"\$\$|\$\((\w+)\)",
        lambda m: "$" if m[1] is None else env.get(m[1], m[0]),
        text,
    )


def image_of_this_machine(python: Path, source: Path) -> dict[str, str]:
    """The environment of an image that has jobkit and torch: those of this Python."""
    return {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(source),
        "LANG": "C.UTF-8",
    }
