"""Planning a Hugging Face model repository from any source.

What goes in: the model's tensors under their own names, an index if there are several files, and every
file of ``assets`` that goes along (config, tokenizer, code, licence). What stays out, always reported: optimizer
state, other training state, and the twin of a tied weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vescale_fsdp.checkpoint.moves.plan import ClosingFile, FilePlan, FixedBytes, OutputPlan, whole
from vescale_fsdp.checkpoint.moves.tensor_view import TensorView
from vescale_fsdp.conversion.formats.huggingface.assets import Assets
from vescale_fsdp.conversion.formats.huggingface.repository import (
    index_bytes,
    index_of,
    is_weight_file,
    plan_shards,
    stem_of,
)
from vescale_fsdp.conversion.formats.huggingface.safetensors import make_header


def plan_hf(
    views: Sequence[TensorView],
    assets: Assets,
    max_shard_bytes: int,
    metadata: Mapping[str, str] | None = None,
) -> OutputPlan:
    """The files of a repository with these tensors, single or sharded; ``metadata`` goes into the header of each.

    Raises:
        ConversionError: for a type safetensors lacks, or an index too large for loaders.
    """
    by_name = {view.info.name: view for view in views}
    stem = stem_of(assets.settings)
    shards = plan_shards([view.info for view in views], max_shard_bytes, stem)
    closing = [ClosingFile(file, assets.reader(file)) for file in assets.files]
    if len(shards) > 1:
        index = index_bytes(shards)
        closing.append(ClosingFile(index_of(stem), lambda: (index,)))
    files = []
    for shard in shards:
        header = make_header(shard.infos, {"format": "pt", **(metadata or {})})
        tensors = (whole(by_name[name]) for name in header.offsets)
        files.append(FilePlan(shard.file, (FixedBytes(header.data), *tensors)))
    return OutputPlan("hf", tuple(files), tuple(closing), is_stale=is_weight_file)
