"""The lab of network namespaces: what a node has of its own, exact bytes, rates, cut cables, and a lab's end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

import tools.lab
from tests.support.processes import wait_until
from tools.lab import Lab, LabError, Run, host_of
from tools.lab.__main__ import main

pytestmark = pytest.mark.lab

MESSAGE_BYTES = 1 << 20  # 1 MiB
HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP 32 with time stamps
# Without folders of /tmp that hold the checkout or this Python, if some do: nodes share both.
PRINT_NODE = """import os, socket, sys
shared = (f'{os.getcwd()}/', f'{sys.prefix}/')
own = [name for name in os.listdir('/tmp') if not any(each.startswith(f'/tmp/{name}/') for each in shared)]
print(socket.gethostname(), *os.listdir('/dev/shm'), *own)"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two nodes, 1 Gb/s."""
    with Lab(nodes=2, cores_per_node=1, minutes=5) as made:
        yield made


def connection(lab: Lab, node: int, peer: int) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection from a node to a peer, in this process."""
    with ExitStack() as stack:
        with lab.network(peer):
            server = stack.enter_context(socket.create_server((host_of(peer), 0)))
        with lab.network(node):
            client = stack.enter_context(socket.create_connection(server.getsockname(), timeout=60))
        accepted = stack.enter_context(server.accept()[0])
        accepted.settimeout(60)
        stack.pop_all()
    server.close()
    return client, accepted


def send(client: socket.socket, server: socket.socket, num_messages: int) -> float:
    """Send messages one after the other, each confirmed by a byte; returns seconds."""
    start_s = time.monotonic()
    for _ in range(num_messages):
        left = memoryview(bytes(MESSAGE_BYTES))
        missing = MESSAGE_BYTES
        client.setblocking(False)
        while missing:  # one thread does both ends
            if left:
                with suppress(BlockingIOError):
                    left = left[client.send(left) :]
            server.settimeout(0.001 if left else 60)
            try:
                missing -= len(server.recv(missing))
            except TimeoutError:
                continue
        client.settimeout(60)
        server.send(b"!")
        assert client.recv(1) == b"!"
    return time.monotonic() - start_s


def test_a_node_has_its_own_name_memory_and_temporary_folder(lab: Lab) -> None:
    """A file of one node's /dev/shm and /tmp is on no other, nor on this machine; the working directory is shared."""
    ours = [
        Path(folder, f"of_node_0_{os.getpid()}") for folder in ("/dev/shm", "/tmp")
    ]  # this machine may have others
    lab.call(0, ["touch", *map(str, ours)])

    assert [lab.call(node, [sys.executable, "-c", PRINT_NODE]) for node in (0, 1)] == [
        " ".join(("node0", *(file.name for file in ours))),
        "node1",
    ]
    assert [lab.call(node, ["nproc"]) for node in (0, 1)] == ["1", "1"]
    assert not any(file.exists() for file in ours)
    assert lab.call(1, ["pwd"]) == str(Path.cwd())


def test_counters_have_the_bytes_of_a_message_and_its_headers(lab: Lab) -> None:
    """And nothing of what a node's ranks send each other."""
    client, server = connection(lab, 0, 1)
    with client, server:
        before = lab.bytes()
        send(client, server, 4)
        after = lab.bytes()
    sent, received = after[0] - before[0], after[1] - before[1]
    for num_bytes, num_packets in (
        (sent.sent_bytes, sent.sent_packets),
        (received.received_bytes, received.received_packets),
    ):
        # A packet that is sent again, or acknowledged selectively, has some bytes more.
        assert 0 <= num_bytes - HEADER_BYTES * num_packets - 4 * MESSAGE_BYTES < 0.01 * MESSAGE_BYTES
    assert received.sent_bytes - HEADER_BYTES * received.sent_packets >= 4  # the confirmations

    within = connection(lab, 0, 0)
    with within[0], within[1]:
        before = lab.bytes()
        send(*within, 1)
        assert (lab.bytes()[0] - before[0]).sent_bytes < 1000


def test_a_slow_link_is_slow_both_ways_until_it_is_healed(lab: Lab) -> None:
    """No transfer is faster than the rate, less what a link's bucket holds."""
    lab.slow(1, mbit=40)
    wire_s = 8 * (MESSAGE_BYTES - 2 * tools.lab._BURST) / 40e6
    try:
        for node, peer in ((0, 1), (1, 0)):
            client, server = connection(lab, node, peer)
            with client, server:
                assert send(client, server, 1) > wire_s
    finally:
        lab.heal(1)
    client, server = connection(lab, 0, 1)
    with client, server:
        send(client, server, 1)
        before = lab.bytes()[1]
        assert min(send(client, server, 1) for _ in range(5)) < wire_s
        assert (lab.bytes()[1] - before).received_bytes > 5 * MESSAGE_BYTES


def test_a_cut_cable_ends_no_connection(lab: Lab) -> None:
    """Neither end is told; what was sent meanwhile arrives after `heal`."""
    client, server = connection(lab, 0, 1)
    with client, server:
        lab.cut(1)
        client.sendall(b"meanwhile")
        server.settimeout(0.3)
        with pytest.raises(TimeoutError):
            server.recv(9)
        lab.heal(1)
        server.settimeout(60)  # TCP sends again, after pauses that double
        assert server.recv(9) == b"meanwhile"


def test_a_node_without_power_says_nothing_and_comes_back_empty(lab: Lab) -> None:
    """Its processes end and their connections send no FIN; memory and temporary files are gone."""
    hold = "import socket; s = socket.create_server(('10.77.0.2', 5001)); c, _ = s.accept(); c.recv(1); c.recv(1)"
    lab.call(1, ["touch", "/dev/shm/lost"])
    holder = Run({1: lab.popen(1, [sys.executable, "-c", hold])})
    client: list[socket.socket] = []

    def connected() -> bool:
        with lab.network(0):
            each = socket.socket()
        if each.connect_ex((host_of(1), 5001)) == 0:
            client.append(each)
        else:
            each.close()
        return bool(client)

    wait_until(connected, "a connection to the process on node1")
    with client[0]:
        client[0].sendall(b"!")
        lab.kill(1)
        assert holder.wait(60)[1] != 0
        client[0].settimeout(0.3)
        with pytest.raises(TimeoutError):  # neither b"" nor a reset
            client[0].recv(1)
        with pytest.raises(LabError):
            lab.call(1, ["true"])
        lab.heal(1)
        # The new node knows nothing of the connection, and says so when it hears of it.
        client[0].settimeout(60)
        client[0].sendall(b"?")
        with pytest.raises(ConnectionResetError):
            client[0].recv(1)
    assert lab.call(1, [sys.executable, "-c", PRINT_NODE]) == "node1"


@pytest.mark.part("jobs")
def test_torchrun_numbers_ranks_by_node_and_a_failed_job_leaves_none(tmp_path: Path) -> None:
    """Ranks of a node are neighbors; after a failure all processes of all nodes are killed."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, socket, time\n"
        "folder = pathlib.Path(__file__).parent\n"
        "(folder / os.environ['RANK']).write_text(socket.gethostname())\n"
        "while len(list(folder.iterdir())) < 5:\n"  # torchrun kills ranks when the first of them fails
        "    time.sleep(0.01)\n"
        "exit(3)\n"
    )
    with Lab(nodes=2, minutes=5, shared=[tmp_path]) as lab:
        other = Run({1: lab.popen(1, ["sleep", "1000"])})
        with pytest.raises(LabError):
            lab.run([str(script)], nproc_per_node=2, timeout_s=200)
        assert other.wait(60)[1] != 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == ["node0", "node0", "node1", "node1"]


def test_a_lab_ends_with_its_owner_and_after_its_time(tmp_path: Path) -> None:
    """SIGKILL of the owner leaves no process, and so no namespace, and no folder."""
    make = "import time; from tools.lab import Lab; lab = Lab(2, minutes=5); lab.popen(0, ['sleep', '1000'])"
    make += "; print(lab.name, *(pid for pid, _ in lab._inits.values()), flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", make], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name, *pids = owner.stdout.readline().split()
        assert Lab.attach(name).num_nodes == 2
        owner.kill()
    for pid in pids:
        wait_until(lambda pid=pid: tools.lab._birth(int(pid)) is None, f"the end of process {pid}")
    wait_until(lambda: not (tools.lab._folders() / name).exists(), f"the removal of the folder of {name}")

    keeper = Path(tools.lab.__file__).with_name("keeper.py")
    (tmp_path / "lab").mkdir()
    subprocess.run([sys.executable, "-I", keeper, tmp_path / "lab", "0"], check=True, timeout=60)
    assert not (tmp_path / "lab").exists()


def test_commands_that_do_not_fit_end_with_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`down` without `up`, `up` twice, unknown and killed nodes, no rights, no iproute2."""
    name = f"test-{os.getpid()}"

    def call(*arguments: str) -> tuple[int, int]:
        """Exit code, and lines of the message."""
        done = CliRunner().invoke(main, [*arguments, "--name", name])
        return done.exit_code, len(done.stderr.splitlines())

    assert call("down") == call("bytes") == call("cut", "0") == (2, 1)
    up = [sys.executable, "-m", "tools.lab", "up", "--nodes", "1", "--minutes", "5", "--name", name]
    try:
        subprocess.run([*up, "--owner", str(os.getpid())], check=True, timeout=60)
        assert call("up") == (2, 1)
        assert call("cut", "1") == call("heal", "1") == call("slow", "9", "--mbit", "5") == (2, 1)
        assert call("kill", "0") == (0, 0) and call("kill", "0") == (2, 1)
        assert call("heal", "0") == (0, 0)
    finally:
        assert call("down") == (0, 0)

    for path, files in (("/nowhere", []), (f"{tmp_path}:{tools.lab._PATH}", ["unshare"])):
        for file in files:  # as for a user who may not make namespaces
            (tmp_path / file).write_text("#!/bin/sh\nexit 1\n")
            (tmp_path / file).chmod(0o755)
        monkeypatch.setattr(tools.lab, "_PATH", path)
        tools.lab.missing.cache_clear()
        assert call("up") == (2, 1)
    monkeypatch.undo()
    tools.lab.missing.cache_clear()
