"""Universal checkpoints of DeepSpeed's: one folder per parameter, whatever ranks there were.

zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt     a tensor, or a dict with it under param; flat after ZeRO-3
zero/NAME/step.pt                                a number
zero/optimizer_state.pt                          the optimizer's groups
mp_rank_00_model_states.pt ...                   as it was: buffers, frozen parameters, counters
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vescale_fsdp.checkpoint.moves.stored_tensor import StoredTensor, TensorInfo
from vescale_fsdp.checkpoint.state.nesting import Path, name_of
from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.conversion.formats.deepspeed.zero_files import ZeroFiles
from vescale_fsdp.conversion.formats.deepspeed.zero_shards import Shapes, add_param_groups
from vescale_fsdp.conversion.formats.torch_save.found_entries import FoundEntries, OpenedFile
from vescale_fsdp.conversion.formats.torch_save.pickle_reader import TensorRef
from vescale_fsdp.layout.geometry import whole_box

_WEIGHT, _STEP = "fp32", "step"


class UniversalFolder:
    """Parameters of a universal checkpoint.

    Args:
        store: where the files are.
        files: which.
        shapes: of the parameters that are trained, as the file of the model knows them.
    """

    def __init__(self, store: Storage, files: ZeroFiles, shapes: Shapes) -> None:
        self._store, self._files, self._shapes = store, files, shapes
        self._shape = {name: shape for group in shapes for name, shape in group.items()}
        common = f"{files.folder}zero/optimizer_state.pt"
        self._common = OpenedFile.open(store, common) if store.size(common) is not None else None

    def weight(self, name: str, path: Path) -> StoredTensor:
        """A parameter's masters.

        Raises:
            CorruptCheckpointError: if its folder is not there.
        """
        return self._tensor(name, _WEIGHT, path)

    def _tensor(self, name: str, kind: str, path: Path) -> StoredTensor:
        opened = OpenedFile.open(self._store, f"{self._files.folder}zero/{name}/{kind}.pt")
        content = opened.archive.content
        ref = content.get("param") if isinstance(content, Mapping) else content
        if not isinstance(ref, TensorRef):
            raise opened.damaged("a tensor", type(ref).__name__)
        shape = self._shape[name]
        if len(ref.shape) == len(shape):  # in its own shape, which may be less than was padded
            return opened.tensor(path, ref)
        if ref.shape != (math.prod(shape),):
            raise opened.damaged(f"{math.prod(shape)} elements, of shape {shape}", f"shape {ref.shape}")
        flat = opened.flat(ref)
        return StoredTensor(TensorInfo(name_of(path), shape, flat.dtype), (flat.chunk(whole_box(shape), 0),))

    def add_optimizer(self, entries: FoundEntries) -> None:
        """The optimizer's state by parameter."""
        common = self._common.content if self._common is not None else {}
        states = (common.get("optimizer_state_dict") or {}).get("state") or {}
        groups = common.get("param_groups") or ()
        for number, group in enumerate(self._shapes):
            options: Mapping[str, Any] = next((g for g in groups if number in g["params"]), {})
            step = states.get(number, {}).get(_STEP, options.get(_STEP))
            for name in group:
                self._add_state(entries, name, step)
        if self._common is not None:
            add_param_groups(entries, groups, self._shapes, self._common)

    def _add_state(self, entries: FoundEntries, name: str, step: Any) -> None:
        found = [file.rpartition("/")[2].removesuffix(".pt") for file in self._files.parameters[name]]
        moments = [kind for kind in found if kind not in (_WEIGHT, _STEP)]
        for kind in moments:
            path = ("optimizer", "state", name, kind)
            entries.add_tensor(path, self._tensor(name, kind, path))
        if _STEP in found:
            opened = OpenedFile.open(self._store, f"{self._files.folder}zero/{name}/{_STEP}.pt")
            entries.add_step(("optimizer", "state", name, _STEP), opened.archive.content, opened)
        elif moments and step is not None and self._common is not None:
            entries.add_step(("optimizer", "state", name, _STEP), step, self._common)
