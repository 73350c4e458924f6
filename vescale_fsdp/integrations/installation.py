"""as_fsdp2, install: replace torch's FSDP2 functions with this package's, for training stacks that call torch's.

    with as_fsdp2(granularity=Rows(32)):
        trainer = Trainer(...)          # accelerate, Trainer and TRL import torch's names inside their functions
        trainer.train()

**The replacement is process-wide**: while it is active, every caller in every thread of the process gets the functions
of `stand_ins`. These functions call torch's for all modules and tensors that this package did not shard. Installations
are counted: the first one replaces torch's names, and the end of the last one restores them. The newest active
installation sets granularity and padding.

If a module has imported a name already (``from torch.distributed.fsdp import fully_shard`` at its top), it keeps
torch's function, and a `BoundNamesWarning` lists the module. `stand_ins` lists the few modules of stacks that are known
to do this; the names in these modules are replaced too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import ModuleType

from vescale_fsdp.errors import BoundNamesWarning, UnshardedWarning, callers_level, explain
from vescale_fsdp.integrations.replaced_names import AfterImport, StandIn, bound_names, replace, restore
from vescale_fsdp.integrations.stand_ins import ACTIVE, STAND_INS, PatternRule, Settings
from vescale_fsdp.integrations.tried_versions import TRIED, check_version
from vescale_fsdp.layout.granularity import GranularityRule
from vescale_fsdp.layout.padding import PaddingPolicy


class Installation:
    """A replacement of torch's functions, created by `install` and active until `uninstall`.

    Args:
        settings: arguments that this installation adds to ``fully_shard``.
        stand_ins: the functions that this installation replaces.

    Examples:
        >>> import torch
        >>> import torch.distributed.fsdp
        >>> installation = install(granularity="rows:32")
        >>> model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(64, 64))  # what a stack does inside
        >>> installation.uninstall()
    """

    def __init__(self, settings: Settings, stand_ins: Sequence[StandIn]) -> None:
        self._settings = settings
        self._stand_ins = tuple(stand_ins)
        replace(self._stand_ins)
        ACTIVE.append(settings)
        _installed.append(self)
        self._later: AfterImport | None = None
        if _ACCELERATOR_MODULE not in sys.modules:  # no function that is replaced is called before its import
            self._later = AfterImport(_ACCELERATOR_MODULE, self._replace_in_accelerate)

    def _replace_in_accelerate(self) -> None:
        """Replace functions of accelerate, which was imported after this installation."""
        self._settings.checked.add("accelerate")
        added = _stand_ins_of_accelerate(check_version("accelerate"))
        self._stand_ins += added
        replace(added)

    def uninstall(self) -> None:
        """End this installation. The end of the last installation restores torch's names. A second call does nothing.

        Warns:
            UserWarning: if a pattern of its granularity matched no parameter of any ``fully_shard`` call.
            UnshardedWarning: if no model was sharded, or met that this package has sharded.
        """
        if self._end():
            self._warn()

    def _end(self) -> bool:
        """End this installation without a warning, as after an error. Returns False if it has ended already."""
        try:
            _installed.remove(self)  # atomic: if two threads end this installation, only one thread continues
        except ValueError:
            return False
        # Before `restore`, so that a stand-in that another thread calls meanwhile calls torch's function.
        ACTIVE.remove(self._settings)
        if self._later is not None:
            self._later.end()
        restore(self._stand_ins)
        return True

    def _warn(self) -> None:
        """Warn about what the user has asked for, and no stack has done."""
        if not self._settings.settled.is_set():
            text = explain(
                "An installation of vescale_fsdp has ended, and nothing was sharded.",
                expected="a call of torch.distributed.fsdp.fully_shard by the training stack",
                got="none",
                todo="let the stack choose FSDP2 (accelerate: fsdp_version=2; Trainer: fsdp=True, fsdp_config="
                "{'version': 2}), start it with torchrun, and build its trainer inside as_fsdp2()",
            )
            warnings.warn(text, UnshardedWarning, stacklevel=callers_level())
        rule = self._settings.granularity
        unmatched = rule.unmatched() if isinstance(rule, PatternRule) else {}
        if unmatched:
            text = explain(
                "A pattern of the granularity mapping matched no parameter of the sharded modules.",
                expected="patterns (fnmatch) of names relative to the modules that the stack shards",
                got=", ".join(map(repr, unmatched)),
                where="; ".join(
                    f"near {pattern!r}: {', '.join(near)}" for pattern, near in unmatched.items()
                ),
                todo="begin the pattern with *",
            )
            warnings.warn(text, stacklevel=callers_level())


_installed: list[Installation] = []
_ACCELERATOR_MODULE = "accelerate.accelerator"


def install(
    *, granularity: GranularityRule = None, padding_policy: PaddingPolicy | None = None
) -> Installation:
    """Replace torch's FSDP2 functions in the whole process, until the installation ends.

    Args:
        granularity: as for `vescale_fsdp.fully_shard`, for all modules that stacks shard from now on. Each pattern of a
            mapping must match a parameter in at least one call of ``fully_shard``.
        padding_policy: as for `vescale_fsdp.fully_shard`.

    Returns:
        The installation, whose ``uninstall()`` ends it.

    Raises:
        LayoutError: if the granularity is not valid, before anything is replaced.

    Warns:
        BoundNamesWarning: if modules have imported torch's own functions already.
        UntriedVersionWarning: if an imported stack has an untested version. For a stack that is imported later, the
            warning is issued when the stack shards a model.

    Examples:
        >>> import torch
        >>> import torch.distributed.fsdp
        >>> installation = install(granularity="rows:32")
        >>> model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(64, 64))  # what a stack does inside
        >>> installation.uninstall()
    """
    rule = PatternRule(granularity) if isinstance(granularity, Mapping) else granularity
    imported = {package for package in TRIED if package in sys.modules}
    by_stack = _stand_ins_of({package for package in imported if check_version(package)})
    padding = padding_policy if padding_policy is not None else PaddingPolicy()
    settings = Settings(rule, padding, imported)
    stand_ins = (*STAND_INS, *(stand_in for each in by_stack.values() for stand_in in each))
    bound = bound_names(stand_ins)
    if bound:  # warn before anything is replaced, because a filter may turn the warning into an error
        text = explain(
            "Some modules have imported torch's functions already, and will call torch's functions.",
            expected="imports of torch's names after vescale_fsdp.integrations.install()",
            got="; ".join(f"{module}: {', '.join(names)}" for module, names in bound.items()),
            todo="call install() before those modules are imported, or import the names inside their functions. If a "
            "module never calls these functions on your model, ignore this warning",
        )
        warnings.warn(text, BoundNamesWarning, stacklevel=callers_level())
    return Installation(settings, stand_ins)


@contextmanager
def as_fsdp2(
    *, granularity: GranularityRule = None, padding_policy: PaddingPolicy | None = None
) -> Iterator[Installation]:
    """Context manager: calls `install` at the start, and ends the installation at the end, also after an exception.

    Warns:
        UnshardedWarning: at the end, if nothing was sharded in the block.

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
    with _ended(install(granularity=granularity, padding_policy=padding_policy)) as installation:
        yield installation


@contextmanager
def _ended(installation: Installation) -> Iterator[Installation]:
    """Context manager: end an installation, without warnings after an exception."""
    try:
        yield installation
    except BaseException:
        installation._end()
        raise
    installation.uninstall()


def _stand_ins_of(stacks: Set[str]) -> dict[str, tuple[StandIn, ...]]:
    """Return the functions to replace in the modules of each stack.

    Args:
        stacks: imported stacks whose version was tested; other versions may not have these functions.
    """
    by_stack: dict[str, tuple[StandIn, ...]] = {}
    if _ACCELERATOR_MODULE in sys.modules:
        by_stack["accelerate"] = _stand_ins_of_accelerate("accelerate" in stacks)
    # transformers imports its modules lazily, so its loader may not be imported although transformers is.
    if "transformers" in stacks and "transformers.core_model_loading" in sys.modules:
        # Imported here, since these modules import transformers and peft.
        from vescale_fsdp.integrations.transformers import LOADER

        by_stack["transformers"] = LOADER
        if "peft" in stacks:
            from vescale_fsdp.integrations.peft import ADAPTERS

            by_stack["peft"] = ADAPTERS
    if "verl" in stacks and "verl.utils.checkpoint.fsdp_checkpoint_manager" in sys.modules:
        from vescale_fsdp.integrations.verl import VERL

        by_stack["verl"] = VERL
    return by_stack


def _stand_ins_of_accelerate(is_tested: bool) -> tuple[StandIn, ...]:
    """Return the functions to replace in accelerate; only public ones in a version that was not tested."""
    # Imported here, since the module imports accelerate.
    from vescale_fsdp.integrations.accelerate_stand_ins import CHOICE, PREPARATION

    return (PREPARATION, CHOICE) if is_tested else (PREPARATION,)


@contextmanager
def ours_within(
    package: str, *, granularity: GranularityRule, padding_policy: PaddingPolicy
) -> Iterator[None]:
    """Context manager: replace ``fully_shard`` in all imported modules of one package, and in no other module.

    For stacks whose modules import the name at their top, for which `as_fsdp2` would come too late. Functions that
    choose by their arguments (``distribute_tensor``, ``redistribute``, ``set_model_state_dict``) are replaced
    everywhere.

    Args:
        package: top-level name of the package.
        granularity, padding_policy: as for `vescale_fsdp.fully_shard`, for all calls by the package. Each pattern of a
            mapping must match a parameter in at least one call.
    """
    stand_ins = [
        stand_in._replace(
            homes=(
                *(() if stand_in.name == "fully_shard" else stand_in.homes),
                *_modules_with(stand_in, package),
            )
        )
        for stand_in in STAND_INS
    ]
    rule = PatternRule(granularity) if isinstance(granularity, Mapping) else granularity
    with _ended(Installation(Settings(rule, padding_policy), stand_ins)):
        yield


def _modules_with(stand_in: StandIn, package: str) -> list[str]:
    """Return the imported modules of a package that have the original function under its name."""
    return [
        name
        for name, module in list(sys.modules.items())  # a copy, since other threads may import meanwhile
        if name.split(".")[0] == package
        and isinstance(module, ModuleType)  # sys.modules may contain other objects
        # vars instead of getattr, which could make a lazy module import more modules.
        and vars(module).get(stand_in.name) is stand_in.original
    ]
