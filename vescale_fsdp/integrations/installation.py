"""as_fsdp2, install: let stacks that ask torch for FSDP2 find this package.

    with as_fsdp2(granularity=Rows(32)):
        trainer = Trainer(...)          # accelerate, Trainer, TRL import torch's names inside their functions
        trainer.train()

**The replacement is process-wide**: while it stands, every caller in the process that looks one of the names up finds
the stand-ins of `stand_ins`, in whatever thread. They do torch's own for everything that is not ours. Installations
are counted: the first one replaces the names, the last one that goes puts torch's back, and the newest one that stands
decides about granularity and padding. A lock keeps threads from doing half of that.

What cannot be replaced is a name that a module has bound already (``from torch.distributed.fsdp import fully_shard`` at
its top): a `BoundNamesWarning` names those modules. The few stack modules known to do so (homes in `stand_ins`) are
replaced too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import ModuleType

from vescale_fsdp.errors import BoundNamesWarning, explain
from vescale_fsdp.integrations.replaced_names import StandIn, bound_names, put_back, replace
from vescale_fsdp.integrations.stand_ins import IN_FORCE, STAND_INS, PatternRule, Settings
from vescale_fsdp.integrations.tried_versions import TRIED, check_version
from vescale_fsdp.layout.granularity import GranularityRule
from vescale_fsdp.layout.padding import PaddingPolicy


class Installation:
    """One standing `install`; made by it.

    Args:
        settings: what it adds to the arguments of ``fully_shard``.
        stand_ins: what it replaces.

    Examples:
        >>> installation = install(granularity="rows:32")
        >>> installation.uninstall()
    """

    def __init__(self, settings: Settings, stand_ins: Sequence[StandIn]) -> None:
        self._settings = settings
        self._stand_ins = tuple(stand_ins)
        replace(self._stand_ins)
        IN_FORCE.append(settings)
        _standing.append(self)

    def uninstall(self) -> None:
        """End it; the last one that ends puts torch's names back. A second call does nothing.

        Warns:
            UserWarning: if a pattern of its granularity matched no parameter of any ``fully_shard`` call.
        """
        try:
            _standing.remove(self)  # atomic: of two threads one gets further
        except ValueError:
            return
        IN_FORCE.remove(self._settings)
        put_back(self._stand_ins)
        rule = self._settings.granularity
        unmatched = rule.unmatched() if isinstance(rule, PatternRule) else {}
        if unmatched:
            warnings.warn(_unmatched_text(unmatched), stacklevel=_callers_level())


_standing: list[Installation] = []


def install(
    *,
    granularity: GranularityRule = None,
    padding_policy: PaddingPolicy | None = None,
) -> Installation:
    """Replace torch's names, process-wide, until every installation has been ended by its `Installation.uninstall`.

    Args:
        granularity: as for `vescale_fsdp.fully_shard`, for all modules that stacks shard from now on. A pattern of a
            mapping must match in one of their calls.
        padding_policy: as for `vescale_fsdp.fully_shard`.

    Returns:
        The installation; its ``uninstall`` ends it.

    Raises:
        LayoutError: if a granularity is none; nothing was replaced.

    Warns:
        BoundNamesWarning: if modules hold torch's own functions already.
        UntriedVersionWarning: if a stack is loaded in a version that was not tried. Of a stack that is imported later
            it comes when that shards a model.

    Examples:
        >>> installation = install(granularity="rows:32")
        >>> installation.uninstall()
    """
    rule = PatternRule(granularity) if isinstance(granularity, Mapping) else granularity
    here = {package for package in TRIED if package in sys.modules}
    loaded = _stand_ins_of({package for package in here if check_version(package)})
    padding = padding_policy if padding_policy is not None else PaddingPolicy()
    settings = Settings(rule, padding, frozenset(loaded), here)
    stand_ins = (*STAND_INS, *(stand_in for each in loaded.values() for stand_in in each))
    bound = bound_names(stand_ins)
    if bound:  # before anything is replaced, for those who make an error of the warning
        warnings.warn(_bound_text(bound), BoundNamesWarning, stacklevel=_callers_level())
    return Installation(settings, stand_ins)


@contextmanager
def as_fsdp2(
    *, granularity: GranularityRule = None, padding_policy: PaddingPolicy | None = None
) -> Iterator[Installation]:
    """`install` on the way in, and the end of that very installation on the way out, exception or not.

    Examples:
        >>> import torch
        >>> import torch.distributed.fsdp
        >>> with as_fsdp2(granularity="rows:4"):
        ...     model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(8, 8))
        >>> type(model).__name__
        'FSDPLinear'
        >>> from vescale_fsdp import FSDPModule
        >>> isinstance(model, FSDPModule)
        True
    """
    installation = install(granularity=granularity, padding_policy=padding_policy)
    try:
        yield installation
    finally:
        installation.uninstall()


def _stand_ins_of(stacks: Set[str]) -> dict[str, tuple[StandIn, ...]]:
    """What else is replaced, for stacks that ask more than torch's names; of tried versions, which have these names."""
    found: dict[str, tuple[StandIn, ...]] = {}
    if "transformers.core_model_loading" not in sys.modules:  # it loads its parts lazily
        return found
    if "transformers" in stacks:
        from vescale_fsdp.integrations.transformers import LOADER

        found["transformers"] = LOADER
    if "transformers" in stacks and "peft" in stacks:
        from vescale_fsdp.integrations.peft import ADAPTERS

        found["peft"] = ADAPTERS
    return found


def _bound_text(bound: Mapping[str, Sequence[str]]) -> str:
    return explain(
        "Some modules have bound torch's names already; what they call stays torch's own.",
        expected="torch's names to be looked up after vescale_fsdp.integrations.install()",
        got="; ".join(f"{module}: {', '.join(names)}" for module, names in bound.items()),
        todo="call install() before those modules are imported, or have them import the names inside functions. "
        "A module that never uses them on your model may be left as it is",
    )


def _unmatched_text(unmatched: Mapping[str, Sequence[str]]) -> str:
    return explain(
        "A pattern of the granularity mapping matched no parameter of the sharded modules.",
        expected="patterns (fnmatch) of names relative to the modules that the stack shards",
        got=", ".join(map(repr, unmatched)),
        where="; ".join(f"near {pattern!r}: {', '.join(near)}" for pattern, near in unmatched.items()),
        todo="begin the pattern with *",
    )


def _callers_level() -> int:
    """stacklevel of whoever called this file, be it by a with statement."""
    level, frame = 1, sys._getframe(1)
    own = (__file__, contextmanager.__code__.co_filename)
    while frame.f_back is not None and frame.f_code.co_filename in own:
        level, frame = level + 1, frame.f_back
    return level


@contextmanager
def ours_within(
    package: str, *, granularity: GranularityRule, padding_policy: PaddingPolicy
) -> Iterator[None]:
    """Replace ``fully_shard`` in the loaded modules of one package, and nowhere else.

    For stacks whose modules bind the name at their top, where `as_fsdp2` comes too late.

    Args:
        package: its top-level name.
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`, for all its calls; a pattern of a mapping must
            match in one of them.
    """
    (stand_in,) = (each for each in STAND_INS if each.name == "fully_shard")
    homes = tuple(
        name
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == package
        and isinstance(module, ModuleType)
        and vars(module).get(stand_in.name) is stand_in.original
    )
    rule = PatternRule(granularity) if isinstance(granularity, Mapping) else granularity
    installation = Installation(Settings(rule, padding_policy), [stand_in._replace(homes=homes)])
    try:
        yield
    finally:
        installation.uninstall()
