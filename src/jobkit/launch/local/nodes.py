"""One run on several machines without Slurm: run.sh on each, started and ended together.

    python -m jobkit.launch.local.nodes --nnodes 2 --node-rank 0 --master-addr node1 \
        --ranks 4 --logs logs/single -- bash run.sh ...

Node 0 listens at the master's address. It says when an attempt starts, hands every signal on to
all nodes, ends them where one fails or is lost, and decides whether the run is started again.
Standard library only. As with torchrun, whoever reaches the port can end the run.
"""

import argparse
import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from jobkit.errors import Exit, Parser, UsageError, at_least, command
from jobkit.launch.local.link import Link, Message, connect, interface_of, listen, meet
from jobkit.paths import RunPaths, write_json

_POLL_S = 0.05
_LEFT_S = 15.0  # for run.sh to end after its ranks were killed
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_NOT_AGAIN = (0, 2, 126, 127)  # as in run.sh: another start would not mend it


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        prog="jobkit.launch.local.nodes",
        description="Start run.sh as one node of several, and end it with the others.",
        epilog="example:\n  python -m jobkit.launch.local.nodes --nnodes 2 --node-rank 0 "
        "--master-addr node1 --logs logs/single -- bash run.sh --strategy ddp",
    )
    made.add_argument("--nnodes", type=at_least(int, 1), required=True, metavar="N")
    made.add_argument("--node-rank", type=at_least(int, 0), required=True, metavar="K")
    made.add_argument("--master-addr", required=True, metavar="HOST")
    made.add_argument("--master-port", type=at_least(int, 1), default=29500, metavar="P")
    made.add_argument("--ranks", type=at_least(int, 1), default=1, metavar="N")
    made.add_argument("--start-timeout", type=at_least(float, 0), default=60.0, metavar="S")
    made.add_argument("--shutdown-timeout", type=at_least(float, 0), default=15.0, metavar="S")
    made.add_argument("--max-restarts", type=at_least(int, 0), default=0, metavar="N")
    made.add_argument("--logs", type=Path, required=True, metavar="DIR")
    made.add_argument("--run-dir", type=Path, metavar="DIR")
    return made


class Node:
    """One machine's part of the run; node 0 also decides for all."""

    def __init__(self, args: argparse.Namespace, words: Sequence[str]) -> None:
        self.args, self.words = args, words
        self.first = args.node_rank == 0
        self.links = dict[int, Link]()
        self.child: subprocess.Popen[bytes] | None = None
        self.deadline = float("inf")
        self.stopped = 0  # the code of a signal that ends the run: 130 or 143
        self.result: int | None = None
        self.heard = list[int]()
        self.codes, self.worst, self.reason = dict[int, int](), 0, ""
        self.attempt, self.restarts, self.name = 0, 0, ""
        for signum in (*_FORWARDED, *_ENDING):
            signal.signal(signum, self._hear)

    def _hear(self, signum: int, _frame: FrameType | None) -> None:
        self.heard.append(signum)

    def _asked_to_end(self) -> bool:
        return any(signum in _ENDING for signum in self.heard)

    def run(self) -> int:
        """Take part from the start to the end; return the exit code, the same on every node."""
        args = self.args
        own: Message = {"node": args.node_rank, "nodes": args.nnodes, "ranks": args.ranks}
        where, until = (args.master_addr, args.master_port), time.monotonic() + args.start_timeout
        if self.first:
            with listen(*where) as listener:
                self.links = meet(listener, own, until, self._asked_to_end)
        else:
            self.links = {0: connect(*where, own, until, self._asked_to_end)}
        if len(self.links) < (args.nnodes - 1 if self.first else 1):
            return 130 if signal.SIGINT in self.heard else Exit.TERMINATED  # asked to end
        if self.first:
            self._start_all()
        try:
            self._follow()
        finally:
            for link in self.links.values():
                link.close()
        assert self.result is not None
        return self.result

    def _follow(self) -> None:
        with selectors.DefaultSelector() as selector:
            for node, link in self.links.items():
                selector.register(link.socket, selectors.EVENT_READ, node)
            while self.result is None:
                for node, link in self.links.items():
                    for message in link.take():
                        self._told(node, message)
                for key, _ in selector.select(_POLL_S):
                    link = self.links[key.data]
                    link.receive()
                    for message in link.take():
                        self._told(key.data, message)
                    if link.ended:
                        selector.unregister(link.socket)
                        self._told(key.data, {"lost": True})
                while self.heard:
                    self._tell({"signal": self.heard.pop(0)})
                self._watch()

    def _watch(self) -> None:
        """Notice the end of this node's run.sh, or that it does not end."""
        if self.child is None:
            if self.first and time.monotonic() > self.deadline + _LEFT_S:
                for node in set(range(self.args.nnodes)) - set(self.codes):
                    self._told(node, {"lost": True})
            return
        code = self.child.poll()
        if code is not None:
            self.child = None
            self._tell({"ended": 128 - code if code < 0 else code})
        elif time.monotonic() > self.deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)

    def _tell(self, message: Message) -> None:
        """Something happened here: node 0 decides what follows of it."""
        if self.first:
            self._told(0, message)
        else:
            self.links[0].send(message)

    def _everyone(self, message: Message) -> None:
        for link in self.links.values():
            link.send(message)
        self._act(message)

    def _told(self, node: int, message: Message) -> None:
        """A message from a node: on node 0 from any, elsewhere from node 0."""
        if not self.first:
            if "lost" in message:
                print("jobkit: error: node 0 was lost: ending the run", file=sys.stderr)
                self._end_child()
                self._wait_for_child()
                self.result = self.stopped or Exit.FAILED
            else:
                self._act(message)
            return
        if "lost" in message:  # also after its end: it cannot take part in another start
            self.restarts = self.args.max_restarts
        if "signal" in message:
            self._everyone({"signal": message["signal"]})
        elif node not in self.codes and ("ended" in message or "lost" in message):
            self._node_ended(node, message)

    def _node_ended(self, node: int, message: Message) -> None:
        """Node 0: note a node's code; end the others if it failed; decide when all have ended."""
        code = self.codes[node] = int(message.get("ended", Exit.FAILED))
        if code not in (Exit.OK, Exit.AGAIN) and not self.worst:
            lost = "lost" in message
            self.worst = code
            self.reason = f"node {node} was lost" if lost else f"node {node}: exit code {code}"
            if not self.stopped:
                text = f"jobkit: warning: {self.reason}: ending all nodes"
                print(text, file=sys.stderr, flush=True)
            self._everyone({"end": True})
        if len(self.codes) < self.args.nnodes:
            return
        final = self.worst or max(self.codes.values())
        self._note_outcome(final)
        again = final not in _NOT_AGAIN and not self.stopped
        if again and self.restarts < self.args.max_restarts:
            self.restarts += 1
            print(
                f"jobkit: warning: attempt {self.attempt} ended with code {final}: starting the "
                f"run again ({self.restarts} of {self.args.max_restarts})",
                file=sys.stderr,
                flush=True,
            )
            self._start_all()
        else:
            self._everyone({"done": self._judged(final)})

    def _judged(self, code: int) -> int:
        """Node 0: the code of the run; after a signal the signal's, in a pod what the run left."""
        # Here, as a node's run.sh may have looked before rank 0 had written the outcome.
        if self.stopped and os.environ.get("JOBKIT_POD"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                outcome = json.loads(RunPaths(self._run_dir()).outcome(self.attempt).read_text())
                if outcome["exit_code"] in (Exit.OK, Exit.AGAIN):
                    return int(outcome["exit_code"])
        return self.stopped or code

    def _note_outcome(self, code: int) -> None:
        """Leave outcome.json where no rank and no run.sh of node 0 could say how it ended."""
        path = RunPaths(self._run_dir()).outcome(self.attempt)
        if not self.worst or self.stopped or path.exists():
            return
        outcome = {"exit_code": code, "status": "failed", "reason": self.reason}
        with contextlib.suppress(OSError):
            write_json(path, {**outcome, "run_id": self._run_dir().name, "attempt": self.attempt})

    def _start_all(self) -> None:
        """Node 0: the next attempt, on every node."""
        self.name = self.name or time.strftime("run-%Y%m%d-%H%M%S-") + str(os.getpid())
        taken = RunPaths(self._run_dir()).attempt_numbers()
        attempt = max([*taken, self.attempt - 1 + bool(self.restarts)], default=-1) + 1
        with socket.socket(self.family()) as free:
            free.bind(("", 0))
            port = int(free.getsockname()[1])
        self.codes, self.worst, self.reason = {}, 0, ""
        start: Message = {"start": attempt, "name": self.name, "port": port}
        self._everyone({**start, "restarts": self.restarts})

    def family(self) -> socket.AddressFamily:
        """IPv4, or IPv6 where the master's address is one."""
        return socket.AF_INET6 if ":" in self.args.master_addr else socket.AF_INET

    def _run_dir(self) -> Path:
        return self.args.run_dir or self.args.logs / self.name

    def _act(self, message: Message) -> None:
        """What node 0 has decided for all."""
        if "start" in message:
            self._start_child(message)
        elif "signal" in message:
            self._signal_child(int(message["signal"]))
        elif "end" in message:
            self._end_child()
        elif "done" in message:
            self.result = int(message["done"])

    def _start_child(self, message: Message) -> None:
        if not re.fullmatch(r"run-[0-9-]{1,60}", name := str(message["name"])):
            raise UsageError("node 0 sent no name of a run: is another program at that port?")
        self.name, self.attempt = name, int(message["start"])
        self.restarts, self.deadline = int(message["restarts"]), float("inf")
        nodes = f"{self.args.nnodes} {self.args.node_rank} {self.attempt}"
        own = {"JOBKIT_NODES": nodes, "JOBKIT_NODES_RUN_DIR": str(self._run_dir())}
        own |= {"MASTER_ADDR": self.args.master_addr, "MASTER_PORT": str(int(message["port"]))}
        own["JOBKIT_RESTARTS"] = str(self.restarts)
        here = self._address()
        own["JOBKIT_NODE_ADDR"] = here
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(here)):
            own["GLOO_SOCKET_IFNAME"] = interface
        self.child = subprocess.Popen(
            self.words, env={**os.environ, **own}, start_new_session=True
        )  # a session of its own: Ctrl-C reaches this process only, which tells all nodes

    def _address(self) -> str:
        """This machine's address, as the other nodes reach it."""
        link = next(iter(self.links.values()), None)
        return link.own_address if link else str(self.args.master_addr)

    def _signal_child(self, signum: int) -> None:
        if signum in _ENDING:
            self.stopped = self.stopped or (130 if signum == signal.SIGINT else Exit.TERMINATED)
            self._end_child()
        elif signum in _FORWARDED and self.child:
            self.child.send_signal(signum)

    def _end_child(self) -> None:
        if self.deadline == float("inf"):
            if self.child:
                self.child.terminate()
            self.deadline = time.monotonic() + self.args.shutdown_timeout + _LEFT_S

    def _wait_for_child(self) -> None:
        """Node 0 is gone: wait for the end of this node's own run.sh."""
        while self.child and self.child.poll() is None:
            if time.monotonic() > self.deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.child.pid, signal.SIGKILL)
            time.sleep(_POLL_S)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part; return the exit code of the whole run."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--")
    return Node(parser().parse_args(words[:end]), words[end + 1 :]).run()


if __name__ == "__main__":
    sys.exit(main(None))
