"""A cluster in a box: nodes are Linux namespaces, joined by links of a given rate to one bridge.

    node0: lo, eth0 10.77.0.1 --- veth, tbf both ways --- port0 \\
    node1: lo, eth0 10.77.0.2 --- veth, tbf both ways --- port1 --- bridge, in the keeper's network namespace
    node2: ...

A node has network, mount, UTS and PID namespaces of its own: link, counters, /dev/shm, /tmp, host name, numbers of
processes. Its ranks communicate over its lo, which has no limit. All files outside of /tmp and /dev/shm are shared, as
on a shared file system; so are the working directory, the interpreter, and the folders ``shared`` below /tmp.

Nothing has a name outside of the lab's own namespaces, so labs do not disturb each other. A lab ends with `Lab.down`,
with its owner (killed or not), and after ``minutes`` (`tools.lab.keeper`).

    with Lab(nodes=2, gbit=1.0) as lab:
        lab.run(["script.py"], nproc_per_node=2)
        before = lab.bytes()
        lab.cut(1)

``python -m tools.lab`` has the same as commands.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_MAX_NODES = 64
_START_S = 60.0  # limit for the start of a namespace, and for its end
# Bytes: a link's bucket holds two of the kernel's largest packets, which are then not cut into frames (that would cost
# the cores that compute). Its queue is long enough that no packet is dropped and sent twice.
_BURST, _QUEUE = 128 << 10, 32 << 20


class LabError(RuntimeError):
    """A lab cannot be made, or a command does not fit its state; the message is one sentence."""


class Traffic(NamedTuple):
    """What has passed a node's link since `Lab` made it, headers of Ethernet, IP and TCP included."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*(now - before for now, before in zip(self, earlier, strict=True)))


def traffic_of(process: int | str = "self", link: str = "eth0") -> Traffic:
    """Return the counters of a link in a process's network namespace; a rank reads its own node's."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == link:
            received_bytes, received_packets, *_, sent_bytes, sent_packets = map(int, numbers.split()[:10])
            return Traffic(sent_bytes, received_bytes, sent_packets, received_packets)
    raise LabError(f"process {process} has no link {link}")


def host_of(node: int) -> str:
    """Return the address of a node."""
    return f"10.77.0.{node + 1}"


@cache
def missing() -> str | None:
    """Return why this process cannot make a lab, as one sentence with the cure; None if it can."""
    if sys.platform != "linux":
        return "A lab needs Linux, whose namespaces are its nodes."
    lacking = [
        name
        for name in ("ip", "tc", "nsenter", "setsid", "unshare")
        if shutil.which(name, path=_PATH) is None
    ]
    if lacking:
        return f"A lab needs {' and '.join(lacking)}: install iproute2 and util-linux (apt-get install -y iproute2)."
    # What a node needs, tried: rights differ between containers, user namespaces and kernels.
    tried = "mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && hostname node"
    tried += " && ip link add port0 type veth peer name port1"
    tried += " && tc qdisc add dev port0 root tbf rate 1mbit burst 64kb limit 64kb"
    command = ["unshare", *_NEW, "--net", "--mount", "--uts", "sh", "-c", tried]
    if subprocess.run(command, capture_output=True, env=_environment(), timeout=_START_S).returncode != 0:
        return (
            "A lab needs the rights to make namespaces (CAP_SYS_ADMIN and CAP_NET_ADMIN): run as root, or inside of"
            " `unshare -Urn` where the system allows it."
        )
    return None


_PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # a user's PATH may lack the latter two
_NEW = ("--pid", "--fork", "--kill-child")


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH}


def _run(command: Sequence[str], text: str = "") -> None:
    """Run a command that must succeed, with ``text`` as its input."""
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, env=_environment(), timeout=_START_S
    )
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).split())
        raise LabError(f"`{' '.join(command)}` failed: {said}")


def _birth(pid: int) -> str | None:
    """Return when a process was started, which together with its number names it; None if it has ended."""
    try:
        # After the name, which is in parentheses and may contain spaces: state is field 3, start time field 22.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _folders() -> Path:
    """The folder with a folder per lab of this user."""
    return Path(tempfile.gettempdir()) / f"vescale-lab-{os.getuid()}"


class _Log(threading.Thread):
    """Collects the lines that a process prints."""

    def __init__(self, process: subprocess.Popen[str], echo: Callable[[str], None] | None) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self._process, self._echo = process, echo
        self.start()

    def run(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as printed:
            for line in printed:
                self.lines.append(line.rstrip("\n"))
                if self._echo is not None:
                    self._echo(self.lines[-1])


class Run:
    """A job on the nodes of a lab: one torchrun per node, or one process.

    Args:
        processes: by node.
        echo: called as ``echo(node, line)`` for every line that a node prints.
    """

    def __init__(
        self,
        processes: Mapping[int, subprocess.Popen[str]],
        echo: Callable[[int, str], None] | None = None,
    ) -> None:
        self.processes = dict(processes)
        self._logs = {
            node: _Log(process, None if echo is None else partial(echo, node))
            for node, process in self.processes.items()
        }

    def output(self, node: int) -> str:
        """Return what a node has printed so far."""
        return "\n".join(self._logs[node].lines)

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Wait until the job has ended on all nodes, and return the exit codes by node.

        Raises:
            LabError: if it has not ended in time; with the end of each node's output.
        """
        deadline = time.monotonic() + timeout_s
        try:
            codes = {
                node: process.wait(max(0.0, deadline - time.monotonic()))
                for node, process in self.processes.items()
            }
        except subprocess.TimeoutExpired:
            raise LabError(f"the job runs after {timeout_s:.0f} s\n{self.tails()}") from None
        for log in self._logs.values():
            log.join(5)  # bounded: a daemon that the job has left may keep the pipe open
        return codes

    def tails(self, num_lines: int = 30) -> str:
        """Return the last lines of every node's output."""
        return "\n".join(
            f"[node{node}] {line}" for node, log in self._logs.items() for line in log.lines[-num_lines:]
        )


class Lab:
    """Nodes and their links. A context manager that ends with `down`.

    Args:
        nodes: number of nodes, at most 64.
        gbit: rate of every link, each way, in Gb/s.
        cores_per_node: cores of each node, in turn from this machine's; None: all nodes use all cores.
        minutes: after this time the lab is taken down.
        name: name by which `attach` finds it; default: one of this process alone.
        owner: number of the process with which the lab ends; default: this one. None: only the time limit.
        shared: folders below /tmp that all nodes see, next to the working directory.

    Raises:
        LabError: if this process cannot make a lab (`missing`), or one of that name is up.
    """

    def __init__(
        self,
        nodes: int,
        gbit: float = 1.0,
        *,
        cores_per_node: int | None = None,
        minutes: float = 15.0,
        name: str | None = None,
        owner: int | None = -1,
        shared: Sequence[Path] = (),
    ) -> None:
        reason = missing()
        if reason is not None:
            raise LabError(reason)
        if not 1 <= nodes <= _MAX_NODES or gbit <= 0 or minutes <= 0:
            raise LabError(f"A lab has 1 to {_MAX_NODES} nodes, a positive rate and a positive time limit.")
        self.num_nodes, self.gbit, self.cores_per_node = nodes, gbit, cores_per_node
        self.name = name or f"pid-{os.getpid()}-{secrets.token_hex(3)}"
        self._shared = _below_tmp([Path.cwd(), _ROOT, Path(sys.prefix), *shared])
        self._inits: dict[
            int, tuple[int, str]
        ] = {}  # node -> number and birth of its PID 1; killed nodes have none
        self._num_runs = 0
        self._started: list[subprocess.Popen[str]] = []
        self._folder = _new_folder(self.name)
        try:
            self._keeper = self._start_keeper(minutes, os.getpid() if owner == -1 else owner)
            self._save()
            hosts = "".join(f"{host_of(node)} node{node}\n" for node in range(nodes))
            (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            self._in_switch("link add br0 type bridge mcast_snooping 0", "link set br0 addrgenmode none up")
            for node in range(nodes):
                self._start_node(node)
        except BaseException:
            self.down()
            raise

    @classmethod
    def attach(cls, name: str) -> Lab:
        """Return the lab of this name that another process has made.

        Raises:
            LabError: if none is up.
        """
        folder = _folders() / name
        if not _is_up(folder):
            raise LabError(f"No lab named {name} is up: `python -m tools.lab up` makes one.")
        state = json.loads((folder / "state.json").read_text())
        lab = cls.__new__(cls)
        lab.name, lab._folder, lab._num_runs, lab._started = name, folder, os.getpid() % 1000, []
        lab.num_nodes, lab.gbit, lab.cores_per_node = state["nodes"], state["gbit"], state["cores_per_node"]
        lab._shared = state["shared"]
        lab._keeper = tuple(state["keeper"])
        lab._inits = {int(node): tuple(each) for node, each in state["inits"].items()}
        return lab

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def down(self) -> None:
        """End every process of the lab, and with them its namespaces and links; a no-op for a lab that has ended."""
        keeper = getattr(self, "_keeper", None)
        if keeper is not None:
            pid, birth = keeper
            deadline = time.monotonic() + _START_S
            while _birth(pid) == birth:  # it goes last, after all processes of its PID namespace
                os.kill(pid, signal.SIGKILL)
                if time.monotonic() > deadline:
                    raise LabError(f"process {pid}, the keeper of the lab {self.name}, does not end")
                time.sleep(0.01)
        for process in self._started:
            process.wait(_START_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- faults ---------------------------------------------------------------------------------------

    def cut(self, node: int) -> None:
        """Pull a node's cable: packets of both ways are lost, and nothing tells the processes."""
        self._in_switch(f"link set {self._port(node)} down")

    def heal(self, node: int) -> None:
        """Plug a node's cable in, with the rate that the lab was made with; start a killed node, empty."""
        port = self._port(node, killed=True)
        if node not in self._inits:
            self._start_node(node)
            return
        self._limit(node, 1000 * self.gbit)
        self._in_switch(f"link set {port} up")

    def kill(self, node: int) -> None:
        """Cut a node's power: its processes, /dev/shm and /tmp are gone, and no packet says so."""
        self._in_switch(
            f"link delete {self._port(node)}"
        )  # first, so that no FIN of an ending process passes
        pid, birth = self._inits.pop(node)
        self._save()
        deadline = time.monotonic() + _START_S
        while _birth(pid) == birth:
            os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise LabError(f"node{node} does not end")
            time.sleep(0.01)

    def slow(self, node: int, mbit: float) -> None:
        """Give a node's link another rate, each way, in Mb/s."""
        self._port(node)
        if mbit <= 0:
            raise LabError("A rate is positive.")
        self._limit(node, mbit)

    def bytes(self) -> dict[int, Traffic]:
        """Return the counters of the links of all nodes that have power."""
        return {node: traffic_of(pid) for node, (pid, _) in sorted(self._inits.items())}

    # -- processes ------------------------------------------------------------------------------------

    def command(self, node: int, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        """Return the command that runs ``argv`` on a node."""
        self._port(node)
        chosen: tuple[str, ...] = ()
        if self.cores_per_node is not None:
            cores = sorted(os.sched_getaffinity(0))
            first = node * self.cores_per_node
            own = {cores[(first + i) % len(cores)] for i in range(self.cores_per_node)}
            chosen = ("taskset", "--cpu-list", ",".join(map(str, sorted(own))))
        # nsenter's own option would open the folder before it enters, in this process's mount namespace.
        within = ("sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(cwd or Path.cwd()), *chosen, *argv)
        return ["nsenter", "-t", str(self._inits[node][0]), "--net", "--mount", "--uts", "--pid", *within]

    @contextmanager
    def network(self, node: int) -> Iterator[None]:
        """Put this thread into a node's network: sockets that it makes inside stay there."""
        self._port(node)
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/proc/{self._inits[node][0]}/ns/net", os.O_RDONLY)
        try:
            _enter_network(there)
            try:
                yield
            finally:
                _enter_network(here)
        finally:
            os.close(here)
            os.close(there)

    def popen(
        self, node: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a process on a node; its output and errors are one pipe. It ends with the node or the lab."""
        environment = _environment()
        environment.pop("TMPDIR", None)  # a folder of this machine, which a node does not have
        environment.update(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="eth0", TP_SOCKET_IFNAME="eth0")
        process = subprocess.Popen(
            self.command(node, argv, cwd),
            env={**environment, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._started.append(process)
        return process

    def call(self, node: int, argv: Sequence[str], *, timeout_s: float = 60.0) -> str:
        """Run a process on a node to its end and return what it has printed.

        Raises:
            LabError: if it fails or takes longer.
        """
        job = Run({node: self.popen(node, argv)})
        if job.wait(timeout_s)[node] != 0:
            raise LabError(f"`{' '.join(argv)}` failed on node{node}\n{job.output(node)}")
        return job.output(node)

    def start(
        self,
        argv: Sequence[str],
        *,
        nproc_per_node: int = 1,
        env: Mapping[str, str] | None = None,
        echo: Callable[[int, str], None] | None = None,
    ) -> Run:
        """Start torchrun on all nodes that have power, with its rendezvous on the first of them.

        Args:
            argv: what torchrun takes: a script, or ``-m`` and a module, and its arguments.
            nproc_per_node: ranks per node.
            env: variables next to this process's.
            echo: called as ``echo(node, line)`` for every line that a node prints.
        """
        self._num_runs += 1
        members = sorted(self._inits)
        if not members:
            raise LabError("All nodes are without power.")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(members))]
        torchrun += ["--nproc-per-node", str(nproc_per_node), "--master-addr", host_of(members[0])]
        torchrun += [
            "--master-port",
            str(29500 + self._num_runs),
        ]  # another one: ranks of an earlier run may linger
        environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **(env or {})}
        return Run(
            {
                node: self.popen(node, [*torchrun, "--node-rank", str(index), *argv], env=environment)
                for index, node in enumerate(members)
            },
            echo,
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        nproc_per_node: int = 1,
        timeout_s: float = 300.0,
        env: Mapping[str, str] | None = None,
        echo: Callable[[int, str], None] | None = None,
    ) -> dict[int, str]:
        """Run a job (`start`) to its end and return what each node has printed.

        Raises:
            LabError: if it fails or takes longer; then all processes of the nodes are killed.
        """
        job = self.start(argv, nproc_per_node=nproc_per_node, env=env, echo=echo)
        try:
            codes = job.wait(timeout_s)
            if any(codes.values()):
                raise LabError(f"the job failed, exit codes by node {codes}\n{job.tails()}")
        except BaseException:
            self.clear()
            raise
        return {node: job.output(node) for node in job.processes}

    def clear(self) -> None:
        """Kill all processes of all nodes; the nodes stay."""
        for pid, _ in self._inits.values():
            # -1: every process but PID 1 and the sender. The exit code tells whether there was one, which may be.
            command = ["nsenter", "-t", str(pid), "--mount", "--pid", "sh", "-c", "kill -KILL -1 || true"]
            _run(command)

    # -- construction ---------------------------------------------------------------------------------

    def _start_keeper(self, minutes: float, owner: int | None) -> tuple[int, str]:
        """Start the keeper; returns its number and birth."""
        command = ["unshare", "--net", *_NEW, sys.executable, "-I", str(_HERE / "keeper.py")]
        command += [str(self._folder), str(minutes)]
        with _pidfd(owner) as fds:
            pid = int(self._start([*command, *map(str, fds)], r"(\d+)", fds))
        birth = _birth(pid)
        if birth is None:
            raise LabError("the keeper has ended")
        return pid, birth

    def _start_node(self, node: int) -> None:
        """Start a node's PID 1, in the keeper's PID namespace, and connect it."""
        (self._folder / f"node{node}").mkdir(exist_ok=True)
        command = [
            "nsenter",
            "-t",
            str(self._keeper[0]),
            "--pid",
            "unshare",
            "--net",
            "--mount",
            "--uts",
            *_NEW,
        ]
        command += ["sh", str(_HERE / "node.sh"), f"node{node}", str(self._folder), *self._shared]
        pid = int(self._start(command, r"pid (\d+)"))
        birth = _birth(pid)
        if birth is None:
            raise LabError(f"node{node} has ended")
        self._inits[node] = pid, birth
        self._save()
        self._in_switch(
            f"link add port{node} type veth peer name eth0 address {_mac(node)} netns {pid}",
            f"link set port{node} master br0 addrgenmode none up",
        )
        neighbors = [other for other in range(self.num_nodes) if other != node]
        self._in_node(
            node,
            "link set lo up",
            "link set eth0 addrgenmode none up",  # no IPv6, which sends packets of its own
            f"addr add {host_of(node)}/24 dev eth0",
            # Written down, so that no packet asks for them.
            *(
                f"neigh add {host_of(other)} lladdr {_mac(other)} dev eth0 nud permanent"
                for other in neighbors
            ),
        )
        self._limit(node, 1000 * self.gbit)

    def _start(self, command: Sequence[str], pattern: str, fds: Sequence[int] = ()) -> str:
        """Start a process that stays, and return what ``pattern`` finds in its first line.

        `setsid` gives it a session of its own, because an interrupt of the terminal is not for it, and makes it an
        orphan, because it may outlive this process, or this process may not wait for its end.
        """
        with subprocess.Popen(
            ["setsid", "--fork", *command],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=fds,
        ) as process:
            assert process.stdout is not None
            with selectors.DefaultSelector() as waiting:
                waiting.register(process.stdout, selectors.EVENT_READ)
                line = process.stdout.readline() if waiting.select(_START_S) else ""
        found = re.fullmatch(pattern, line.strip())
        if found is None:
            raise LabError(f"`{' '.join(command)}` did not start: {line.strip() or 'it says nothing'}")
        return found[1]

    def _limit(self, node: int, mbit: float) -> None:
        """Give both ends of a link a rate: each limits what it sends."""
        shape = f"root tbf rate {round(mbit * 1000)}kbit burst {_BURST} limit {_QUEUE}"
        _run([*self._switch, "tc", "-batch", "-"], f"qdisc replace dev port{node} {shape}\n")
        _run([*self._within(node), "tc", "-batch", "-"], f"qdisc replace dev eth0 {shape}\n")

    @property
    def _switch(self) -> list[str]:
        return ["nsenter", "-t", str(self._keeper[0]), "--net"]

    def _within(self, node: int) -> list[str]:
        return ["nsenter", "-t", str(self._inits[node][0]), "--net"]

    def _in_switch(self, *lines: str) -> None:
        _run([*self._switch, "ip", "-batch", "-"], "\n".join(lines) + "\n")

    def _in_node(self, node: int, *lines: str) -> None:
        _run([*self._within(node), "ip", "-batch", "-"], "\n".join(lines) + "\n")

    def _port(self, node: int, *, killed: bool = False) -> str:
        """Return the name of a node's port, after checking that there is such a node and that it has power."""
        if not 0 <= node < self.num_nodes:
            raise LabError(f"No node {node}: the lab {self.name} has node0 to node{self.num_nodes - 1}.")
        if node not in self._inits and not killed:
            raise LabError(f"node{node} is without power: heal it first.")
        return f"port{node}"

    def _save(self) -> None:
        """Write what `attach` reads."""
        state = {
            "keeper": self._keeper,
            "inits": self._inits,
            "nodes": self.num_nodes,
            "gbit": self.gbit,
            "cores_per_node": self.cores_per_node,
            "shared": self._shared,
        }
        written = self._folder / "state.new"
        written.write_text(json.dumps(state))
        written.replace(self._folder / "state.json")


def _enter_network(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12
    if libc.setns(fd, 0x40000000) != 0:  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")


def _mac(node: int) -> str:
    return f"02:00:00:00:00:{node + 1:02x}"


def _below_tmp(paths: Sequence[Path]) -> list[str]:
    """Return the paths that the nodes' own /tmp would hide, without those inside of others."""
    below = sorted(
        {str(path.resolve()) for path in paths if path.resolve().is_relative_to("/tmp")} - {"/tmp"}
    )
    return [path for path in below if not any(path.startswith(f"{other}/") for other in below)]


def _is_up(folder: Path) -> bool:
    """Return whether the lab of this folder has a keeper."""
    try:
        pid, birth = json.loads((folder / "state.json").read_text())["keeper"]
    except FileNotFoundError:
        return False
    return _birth(pid) == birth


def _new_folder(name: str) -> Path:
    """Make the folder of a lab, after removing those of labs that have ended without doing so.

    Raises:
        LabError: if a lab of this name is up.
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise LabError(f"{name!r} is no name: letters, digits, '.', '_' and '-'.")
    _folders().mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in _folders().iterdir():
        # A folder without a state is that of a lab that is being made, unless it is old.
        if not _is_up(folder) and (
            (folder / "state.json").exists() or time.time() - folder.stat().st_mtime > _START_S
        ):
            shutil.rmtree(folder, ignore_errors=True)
    folder = _folders() / name
    try:
        folder.mkdir()
    except FileExistsError:
        raise LabError(f"A lab named {name} is up: `python -m tools.lab down` ends it.") from None
    return folder


@contextmanager
def _pidfd(owner: int | None) -> Iterator[list[int]]:
    """Give a descriptor of the owner, which the keeper can poll from its PID namespace; none without an owner."""
    if owner is None:
        yield []
        return
    try:
        fd = os.pidfd_open(owner)
    except ProcessLookupError:
        raise LabError(f"process {owner}, the lab's owner, has ended") from None
    try:
        yield [fd]
    finally:
        os.close(fd)
