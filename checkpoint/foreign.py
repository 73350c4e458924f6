"""Foreign checkpoints: all that `load`, `verify` and `save` ask of `conversion`, by the one look-up of this package.

conversion stands on checkpoint and has the table of formats. `foreign_formats` is the only place where checkpoint names
it, in a string, so that it is imported when a checkpoint of another format is met.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vescale_fsdp.lazy import function_named

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from vescale_fsdp.checkpoint.manifest.manifest import Manifest
    from vescale_fsdp.checkpoint.native.form import Form
    from vescale_fsdp.checkpoint.native.loadable import Loadable
    from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
    from vescale_fsdp.checkpoint.storage.base import Storage
    from vescale_fsdp.checkpoint.verify_report import VerifyReport


@dataclass(frozen=True)
class SourceOptions:
    """How `load` reads a checkpoint whose tensors differ from the state's in name, layout or encoding.

    Args:
        rules: key rules, as ``vescale-convert --rules``: a shipped set's name or a TOML file.
        rules_to: key rules map names between two sides; this is the side whose names the state has, ``"ours"`` or
            ``"hf"``.
        config: folder or URL of the config.json that rules and ``dequantize`` use; default: the checkpoint's own.
        dequantize: the float dtype that quantized weights are converted to, before rules: ``"bf16"``, as for
            ``vescale-convert``.
        model_prefix: prefix of the model's names in the checkpoint; detected by default.
        adapter_name: the adapter of the state that a peft adapter's folder fills, if the state has several.

    Examples:
        >>> import torch
        >>> from vescale_fsdp.checkpoint import load, save
        >>> save("of_two", {"teacher": {"w": torch.ones(2)}, "student": {"w": torch.zeros(2)}})
        >>> state = {"w": torch.zeros(2)}
        >>> _ = load("of_two", state, source=SourceOptions(model_prefix="teacher"))
        >>> state["w"].tolist()
        [1.0, 1.0]
    """

    rules: str | None = None
    rules_to: str = "ours"
    config: str | None = None
    dequantize: str | None = None
    model_prefix: str | None = None
    adapter_name: str | None = None


class OpenSource:
    """An open checkpoint, as far as this package knows it: the base class of `conversion.Source`.

    Attributes:
        kind: the name of the format.
        store: the folder's storage.
    """

    kind: str
    store: Storage


class ForeignFormats(Protocol):
    """What checkpoint asks about formats that are not its own."""

    def is_known(self, files: Collection[str]) -> bool:
        """Return whether a folder with these file names may be a checkpoint of one of the formats."""

    def loadable(
        self,
        url: str,
        options: SourceOptions | None,
        coordinator: Coordinator,
        casts: Sequence[str],
        manifest: Manifest | None,
    ) -> Loadable:
        """Open a checkpoint of any format for a load.

        Args:
            casts: the ``dtype`` argument of `load`.
            manifest: the manifest of a native checkpoint; None for other formats.

        Raises:
            ConversionError: if the files have no known format, or the options do not apply to them.
        """

    def open(self, url: str) -> OpenSource:
        """Open a checkpoint of any format; reads metadata only.

        Raises:
            ConversionError: if the files have no known format.
        """

    def verify(self, source: OpenSource, deep: bool, progress: Callable[[int], object]) -> VerifyReport:
        """Verify every tensor and every value of an open checkpoint; see `checkpoint.verify`."""

    def dcp_form(self) -> Form:
        """Return the form of ``save(format="dcp")``."""


def foreign_formats() -> ForeignFormats:
    """Import and return what `conversion` answers."""
    return function_named("vescale_fsdp.conversion.live.foreign:ConversionFormats")()  # type: ignore[no-any-return]
