"""The process that a lab lives in: PID 1 of its PID namespace, in the network namespace with the bridge.

    keeper.py FOLDER MINUTES [OWNER_FD]

The kernel kills all processes of a PID namespace with its PID 1, and removes a network namespace, with its links, with
its last process. So a lab leaves nothing behind, however it ends: the keeper ends after MINUTES, when the process of
the pidfd OWNER_FD ends, or when it is killed. Run with the interpreter's ``-I``: only the standard library.
"""

import os
import select
import shutil
import signal
import sys
from pathlib import Path


def main() -> None:
    """Print this process's number, and wait for the owner's end or the time limit."""
    folder, minutes, *owner_fd = sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps orphans, which PID 1 inherits
    # The number outside of the PID namespace: /proc is still the caller's.
    print(Path("/proc/self/stat").read_text().split()[0], flush=True)
    with open(os.devnull, "w") as nothing:  # the caller may close its end of the pipe
        os.dup2(nothing.fileno(), sys.stdout.fileno())
    ended = select.poll()
    for fd in owner_fd:
        ended.register(int(fd), select.POLLIN)
    ended.poll(float(minutes) * 60_000)
    shutil.rmtree(folder, ignore_errors=True)  # what is left there, the next `up` removes


if __name__ == "__main__":
    main()
