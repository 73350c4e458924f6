"""The options of `convert`, for all targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from vescale_fsdp.conversion.engine.copying import CopyLimits
from vescale_fsdp.errors import ConversionError, option

_MAX_PARTS = 65_536  # limited, because every part looks for the journals of all parts
# Options that do not change the bytes of the result. A resumed run may pass other values for them.
_HOW_IT_RUNS = {"overwrite", "resume", "dry_run", "part", "memory_budget_bytes", "threads", "require_check"}


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion: the content of the result, and how the conversion runs.

    Args:
        assets: folder or URL whose settings files are copied (Hugging Face target). None: the source's own, if it has
            settings files next to its weights.
        include_asset: name patterns of further files to copy from the folder of settings files.
        no_assets: copy no settings files, not even the source's own.
        model_prefix: the prefix of the model's names in the source; None to detect it.
        prefix: the prefix of the model's names in the result; None to keep the source's.
        dtype: types to cast floats to, as texts for `CastRules.parse`.
        dequantize: the float type that quantized weights become; None to keep their codes and scales.
        quantize: quantization schemes for weights, as texts for `QuantizeRules.parse`. An error if weights are already
            quantized.
        merge: folder or URL of an adapter to merge into the model (Hugging Face target); None to merge nothing.
        adapter_name: the adapter to write, if the source has several (adapter target).
        include, exclude: patterns of names in the result; only included and not excluded entries are written.
        optimizer: how optimizer state is written: ``"keep"``, ``"nested"``, ``"flattened"`` or ``"drop"``.
        rules: key rules: the name of a shipped set or a TOML file; None to keep all names.
        rules_to: the names of the result: ``"hf"`` for Hugging Face's, ``"ours"`` for the other framework's. None:
            ``"hf"`` for a Hugging Face target, else ``"ours"``.
        on_disagreement: what to do if rules join parameters whose optimizer steps, options or groups differ:
            ``"refuse"``, or use the values of the ``"first"`` parameter.
        max_shard_bytes: maximum number of tensor bytes per data file.
        ranks: number of ranks that a native checkpoint is laid out for.
        granularity: texts for `parse_granularities`. Patterns match a parameter's name after its layer number, such as
            ``mlp.w1.weight``.
        require_check: refuse a Hugging Face folder if it cannot be checked against the class that its config.json
            names.
        fingerprint: record the fingerprints of all tensors: in ``fingerprints.json`` (Hugging Face target), or in the
            manifest (native target). The written files are read once more.
        overwrite: replace the files in the target.
        resume: continue an interrupted run of the same conversion, or start a new run if there was none.
        dry_run: check source and target without writing.
        part: (index, count): this process writes share number ``index``, from 0, of ``count`` shares of the files.
        memory_budget_bytes: total size of all working buffers.
        threads: number of threads that read and write at the same time.

    Raises:
        ConversionError: if ``part`` is out of range, or the memory budget is too small for one thread.

    Examples:
        >>> options = ConvertOptions(assets="original_repo", dtype=("bfloat16", "*.bias=float32"))
        >>> options.max_shard_bytes
        5000000000
    """

    assets: str | None = None
    include_asset: Sequence[str] = ()
    no_assets: bool = False
    model_prefix: str | None = None
    prefix: str | None = None
    dtype: Sequence[str] = ()
    dequantize: str | None = None
    merge: str | None = None
    adapter_name: str | None = None
    quantize: Sequence[str] = ()
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    optimizer: str = "keep"
    rules: str | None = None
    rules_to: str | None = None
    on_disagreement: str = "refuse"
    max_shard_bytes: int = 5 * 10**9  # `resume` rewrites unfinished files; small files need many requests
    ranks: int = 1
    granularity: Sequence[str] = ()
    require_check: bool = False
    fingerprint: bool = False
    overwrite: bool = False
    resume: bool = False
    dry_run: bool = False
    part: tuple[int, int] = (0, 1)
    memory_budget_bytes: int = 512 * 2**20  # 512 MiB
    threads: int = 4

    def __post_init__(self) -> None:
        index, count = self.part
        if not 0 <= index < count <= _MAX_PARTS:
            raise ConversionError(
                "The part is out of range.",
                expected=f"an index from 0, below the number of parts, and at most {_MAX_PARTS:,} parts",
                got=f"{index}/{count}",
                where=option("part"),
                todo="number the parts from 0",
            )
        _ = self.limits  # refuses a budget that is too small, before anything is opened

    @property
    def limits(self) -> CopyLimits:
        """Memory and threads, as `CopyLimits`."""
        return CopyLimits(self.memory_budget_bytes, self.threads)

    def asked(self) -> dict[str, Any]:
        """Return the options that determine the result, as JSON values. `resume` requires the same values."""
        chosen = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in _HOW_IT_RUNS
        }
        return {name: list(v) if isinstance(v, (list, tuple)) else v for name, v in chosen.items()}
