"""Run the cases of one of PyTorch's FSDP2 test files on CPU, by one of several implementations, for `fsdp2_parity`.

    python -m tools.docs.fsdp2_cases RESULTS MODULE IMPLEMENTATION [CASE ..]

RESULTS is a file in the module's folder. It gets one JSON object per line: {"cases"} first, then {"case"} when a case
starts, and {"case", "outcome", "error"} when it has ended.
"""

from __future__ import annotations

import json
import re
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch.testing._internal import common_distributed, common_fsdp

RANKS = 4
TIMEOUT_S = 120  # for each case; PyTorch's test classes end their ranks then
# Parts of errors on ranks whose peers have failed.
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "exited with error code",
    "Timed out waiting",
)
# What the column "plain" takes from this package.
_OURS = ("fully_shard", "FSDPModule", "register_fsdp_forward_method", "share_comm_ctx")


def pretend_devices() -> None:
    """Let PyTorch's tests take CPUs for accelerators, and fork their ranks."""
    cpu = torch.device("cpu")
    replaced: list[tuple[Any, str, Any]] = [
        (torch.accelerator, "device_count", lambda: RANKS),
        (torch.accelerator, "current_accelerator", lambda check_available=False: cpu),
        # Called by the test classes of torch 2.15.
        (torch.accelerator, "set_device_index", lambda index: None),
        (torch.cpu, "device_count", lambda: RANKS),
        (torch.cpu, "manual_seed", torch.manual_seed),
        (common_distributed, "skip_if_lt_x_gpu", _never_skip),
        (common_distributed, "TIMEOUT_DEFAULT", TIMEOUT_S),
        (common_distributed.MultiProcessTestCase, "_spawn_processes", _fork_ranks),
        (common_fsdp, "DEVICE_COUNT", RANKS),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)


def _fork_ranks(case: Any) -> None:
    case._start_processes(torch.multiprocessing.get_context("fork").Process)


def _never_skip(num_gpus: int, **options: object) -> Callable[[Any], Any]:
    return lambda case: case


def substitute(implementation: str) -> None:
    """Replace torch's FSDP2 in this process: "plain" replaces public names, "as_fsdp2" what `integrations` replaces."""
    if implementation == "plain":
        import vescale_fsdp

        for name in _OURS:
            setattr(torch_fsdp, name, getattr(vescale_fsdp, name))
    elif implementation == "as_fsdp2":
        from vescale_fsdp.integrations import install

        install()


class _Written(unittest.TestResult):
    """Writes what happens to each case."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def write(self, **fields: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.write(case=_name(test))

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.write(case=_name(test), outcome="passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.write(case=_name(test), outcome="skipped", error=reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.write(case=_name(test), outcome="failed", error=error_in(f"{err[0].__name__}: {err[1]}"))

    addFailure = addError


def error_in(text: str) -> str:
    """Return the first error in the texts of all ranks that is no echo of another rank's end."""
    errors = re.findall(r"^(?:[\w.]*\.)?(\w*(?:Error|Exception)\b.*)", text, re.MULTILINE)
    own = [error for error in errors if not any(echo in error for echo in _ECHOES)]
    # The first one is torch's, of the process that has collected the texts.
    return (own[1:] or own or errors or [text.strip()])[0][:200]


def _name(test: unittest.TestCase) -> str:
    return ".".join(test.id().split(".")[-2:])


def _cases_in(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _cases_in(each)
        else:
            yield each


def main(results: str, module: str, implementation: str, *wanted: str) -> None:
    sys.path.insert(0, str(Path(results).parent))
    pretend_devices()
    substitute(implementation)
    found = list(_cases_in(unittest.TestLoader().loadTestsFromName(module)))
    written = _Written(Path(results))
    written.write(cases=[_name(each) for each in found])
    unittest.TestSuite(each for each in found if not wanted or _name(each) in wanted).run(written)


if __name__ == "__main__":
    main(*sys.argv[1:])
