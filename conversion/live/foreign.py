"""The answers to `checkpoint.foreign`: what checkpoint asks about formats that are not its own.

Each method imports what it needs, so that a load of one format imports no other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.foreign import OpenSource, SourceOptions
    from vescale_fsdp.checkpoint.manifest.manifest import Manifest
    from vescale_fsdp.checkpoint.native.form import Form
    from vescale_fsdp.checkpoint.native.loadable import Loadable
    from vescale_fsdp.checkpoint.ranks.coordinator import Coordinator
    from vescale_fsdp.checkpoint.verify_report import VerifyReport
    from vescale_fsdp.conversion.engine.source import Source


class ConversionFormats:
    """Implements `checkpoint.foreign.ForeignFormats`, whose docstrings say what each method does."""

    def is_known(self, files: Collection[str]) -> bool:
        from vescale_fsdp.conversion.formats.table import is_known

        return is_known(files)

    def loadable(
        self,
        url: str,
        options: SourceOptions | None,
        coordinator: Coordinator,
        casts: Sequence[str],
        manifest: Manifest | None,
    ) -> Loadable:
        from vescale_fsdp.checkpoint.foreign import SourceOptions
        from vescale_fsdp.conversion.live.source_state import open_for_load
        from vescale_fsdp.conversion.live.viewed_checkpoint import ViewedCheckpoint

        opened = open_for_load(url, options or SourceOptions())
        metadata = None if manifest is None else manifest.metadata
        by_name = manifest is not None and options is None
        return ViewedCheckpoint(opened, coordinator, casts, by_name=by_name, metadata=metadata)

    def open(self, url: str) -> OpenSource:
        from vescale_fsdp.conversion.formats.detect import open_source

        return open_source(url)

    def verify(self, source: OpenSource, deep: bool, progress: Callable[[int], object]) -> VerifyReport:
        from vescale_fsdp.conversion.live.verify_source import verify_source

        return verify_source(cast("Source", source), deep, progress)  # the only subclass of OpenSource

    def dcp_form(self) -> Form:
        from vescale_fsdp.conversion.formats.dcp.form import DcpForm

        return DcpForm()
