"""An accelerator without hardware: device type ``sim``, over PyTorch's PrivateUse1 hooks and the stock CPU wheel.

Every operator, copy and collective is queued on a stream and runs later, in a seeded order (`ORDERS`): at once, only
when the host or another rank waits for it, compute first, side streams first, or at random. What a GPU does by chance,
it does on purpose:

    freed memory        becomes NaN at this place in its stream's work, as with cudaMallocAsync (memory.h); new
                        memory is NaN
    accesses and frees  are compared with earlier accesses of the same bytes; one that no event orders is a hazard,
                        in whatever order tasks run (`hazards`)
    collectives         have NCCL's rules: on the caller's stream, equal on all ranks, buffers aligned and in place
                        where they should be (communicator.h)
    deadlocks           end in an error on every rank, which says which part of which communicator waits for whom
    host waits          are counted, by operator (`counts`)
    a virtual clock     gives each task the duration that a test chooses (`timed`), in any order

The device is built at first use, with the compiler that `torch.utils.cpp_extension` names, into a folder of the virtual
environment: half a minute, once per version of these sources and of torch. It was built and run with torch 2.13; no
other version was tried.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support.async_device import waits
from tests.support.distributed import Pool

if TYPE_CHECKING:
    import pytest

TYPE = "sim"
BACKEND = f"cpu:gloo,{TYPE}:async_device"
_SOURCES = Path(__file__).parent
_NAME = "_async_device"

Order = tuple[str, int]
"""A name of the table in async_device.cpp, and a seed."""

# The same on all ranks, except for "uneven": the first rank early, the others late.
ORDERS: tuple[Order, ...] = (
    ("early", 0),
    ("late", 0),
    ("sides first", 0),
    ("sides last", 0),
    ("uneven", 0),
    *(("random", seed) for seed in range(7)),
)


def missing_compiler() -> str:
    """Why the device cannot be built here; empty if it can be."""
    return (
        ""
        if _built().exists() or shutil.which(_compiler())
        else f"needs a C++ compiler; there is no {_compiler()}"
    )


def needs_device() -> pytest.MarkDecorator:
    """The mark that skips tests where there is no compiler.

    Raises:
        RuntimeError: there, under CI, where tests must not be left out silently.
    """
    import pytest  # imported late, because `tools.gpu_run` uses the device on machines without pytest

    reason = missing_compiler()
    if reason and os.environ.get("CI"):
        raise RuntimeError(reason)
    return pytest.mark.skipif(bool(reason), reason=reason)


def _compiler() -> str:
    from torch.utils.cpp_extension import get_cxx_compiler  # imports setuptools: half a second

    return str(get_cxx_compiler())


@cache
def _built() -> Path:
    """The library's path: a folder per version of Python, of torch and of the sources."""
    digest = hashlib.sha256(f"{sys.version} {torch.__version__}".encode())
    for source in sorted(_SOURCES.glob("*.[hc]*")):
        digest.update(source.read_bytes())
    return Path(sys.prefix) / ".async_device" / digest.hexdigest()[:16] / f"{_NAME}.so"


def build() -> Path:
    """Build the device if there is none; processes that need it at the same time wait for the first."""
    library = _built()
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it if this process is killed
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    folders = [*include_paths(), sysconfig.get_paths()["include"]]
    unfinished = library.with_suffix(".unfinished")
    command = [
        *(_compiler(), "-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w"),
        *(f"-DTORCH_EXTENSION_NAME={_NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H", "-DUSE_DISTRIBUTED"),
        *(part for folder in folders for part in ("-isystem", folder)),
        *(str(_SOURCES / "async_device.cpp"), "-o", str(unfinished)),
        *(f"-L{folder}" for folder in library_paths()),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise RuntimeError(f"the device cannot be built by {_compiler()}:\n{done.stderr[-4000:]}")
    unfinished.rename(library)


@cache
def library() -> Any:
    """Load the device into this process, for good: ``torch.sim`` and the backend "async_device"."""
    spec = importlib.util.spec_from_file_location(_NAME, build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.utils.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, _device_module(module))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("async_device", _new_communicator, extended_api=True, devices=[TYPE])
    return module


def _device_module(module: Any) -> types.ModuleType:
    """What torch and this project expect of ``torch.cuda`` and its like."""
    device = torch.device(TYPE, 0)
    ours = types.ModuleType(f"torch.{TYPE}")

    class Event:
        """Not a subclass: torch's streams take no other class than its own."""

        def __init__(self, of_torch: torch.Event) -> None:
            self.of_torch = of_torch

        def record(self, stream: Any = None) -> None:
            self.of_torch.record(torch.accelerator.current_stream(device) if stream is None else stream)

        def synchronize(self) -> None:
            waits.call(self.of_torch.synchronize)

    class Stream(torch.Stream):
        def wait_event(self, event: Any) -> None:
            of_torch = event.of_torch if isinstance(event, Event) else event
            waits.call(lambda: torch.Stream.wait_event(self, of_torch))

        def wait_stream(self, stream: torch.Stream) -> None:
            event = torch.Stream.record_event(stream)
            waits.call(lambda: torch.Stream.wait_event(self, event))

        def record_event(self, event: Any = None) -> Any:
            waits.make_late_waits()
            return Event(super().record_event())

    def current_stream(device_: Any = None) -> Stream:
        now = torch.accelerator.current_stream(device)
        return Stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)

    @contextmanager
    def stream(chosen: torch.Stream) -> Iterator[torch.Stream]:
        waits.make_late_waits()
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(chosen)
        try:
            yield chosen
        finally:
            torch.accelerator.set_stream(before)

    class _OneDevice(ContextDecorator):
        def __init__(self, device: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    vars(ours).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        device=_OneDevice,
        synchronize=lambda device=None: module.synchronize(),
        Event=lambda **_: Event(torch.Event(device)),
        Stream=lambda device_=None, priority=0, **_: Stream(device=device, priority=priority),
        current_stream=current_stream,
        stream=stream,
        manual_seed=lambda seed: None,  # random numbers are the host's
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    return ours


def _new_communicator(options: Any, _: Any) -> Any:
    """All ranks map a file, whose name the first one tells."""
    rank, size = options.group_rank, options.group_size
    if rank == 0:
        file, path = tempfile.mkstemp(prefix="async-device-")
        os.close(file)
        options.store.set("file", path)
    path = options.store.get("file").decode()
    made = library().communicator(options.group_id, path, rank, size)
    if options.store.add("mapped", 1) == size:
        os.unlink(path)
    return made


def _join_device() -> str:
    library()
    return BACKEND


_pool = Pool(_join_device)


def run_on_device(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0, fresh: bool = False
) -> list[Any]:
    """`run_ranks`, with a device for each rank: ``fn`` may use ``torch.device("sim")`` and process groups on it.

    Args:
        fresh: in new processes. DTensor remembers groups by equal meshes, per thread; what autograd's thread of the
            device remembers, a worker cannot clear after a call.

    Returns:
        In rank order what ``fn`` returned, after the device's work has ended.

    Raises:
        RankError, RankTimeout: as `run_ranks`.
    """
    build()
    if fresh:
        _pool.close()
    return _pool.run(world_size, _call, (fn, args), timeout_s)


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from vescale_fsdp.devices import ACCELERATORS, Accelerator

    device = library()
    try:
        with mock.patch.dict(ACCELERATORS, {TYPE: Accelerator(frozenset({"async_device"}))}):
            result = fn(*args)
        device.synchronize()
        return result
    finally:
        device.reset()


@contextmanager
def in_order(order: Order) -> Iterator[None]:
    """Run what is inside in an order; the device is synchronized before and after."""
    name, seed = order
    rank = dist.get_rank()
    if name == "uneven":
        name = "late" if rank else "early"
    library().set_order(name, seed + 1000 * rank)
    try:
        yield
        library().synchronize()
    finally:
        library().set_order("early", 0)


def timed(durations_s: Mapping[str, float], fn: Callable[[], object]) -> float:
    """Return the seconds that the device's work in ``fn`` takes on a virtual clock, until the last task ends.

    Args:
        durations_s: seconds of each launch by its name in `counts`, equal on all ranks; 0 for all others. A
            collective starts when the last rank has come to it. The host takes no time.
    """
    start_s: float = library().set_durations(dict(durations_s))
    fn()
    return library().set_durations({}) - start_s  # type: ignore[no-any-return]


def hazards() -> list[str]:
    """Accesses of memory that no event orders, since the last call."""
    return list(library().hazards())


def counts() -> Counter[str]:
    """Launches by name, and "sync NAME" for what made the host wait, since the last call."""
    return Counter(library().counts())
