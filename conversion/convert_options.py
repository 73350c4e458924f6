"""The options of `convert`, for all targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from vescale_fsdp.checkpoint.moves.copying import CopyLimits
from vescale_fsdp.errors import ConversionError

_MAX_PARTS = 65_536  # a bound, since every part looks for the journals of all parts
# Options that change how the result is written, not what is written: a resumed run may change them.
_HOW_IT_RUNS = {"overwrite", "resume", "dry_run", "part", "memory_budget_bytes", "threads", "require_check"}


@dataclass(frozen=True)
class ConvertOptions:
    """What a conversion writes, and how it runs.

    Args:
        assets: folder or URL whose settings files are copied (Hugging Face target); None for the source's own if
            it is a Hugging Face folder.
        include_asset: name patterns of other files in that folder to copy.
        no_assets: copy no settings files, not even the source's own.
        model_prefix: the prefix of the model's names in the source; None to detect it.
        prefix: the prefix of the model's names in the result; None to keep the source's.
        dtype: casts, as texts for `CastRules.parse`.
        dequantize: the float type that quantized weights become; None to keep their codes and scales.
        quantize: schemes for weights, as texts for `QuantizeRules.parse`; weights that are already quantized are
            refused.
        merge: folder or URL of an adapter that is merged into the model (Hugging Face target); None for none.
        adapter_name: which of several adapters is written (adapter target).
        include, exclude: name patterns of the result.
        optimizer: how optimizer state is written: ``"keep"``, ``"nested"``, ``"flattened"`` or ``"drop"``.
        rules: key rules: the name of a shipped set or a TOML file; None to keep all names.
        rules_to: which side of the rules the result is on, ``"hf"`` or ``"ours"``; None: ``"hf"`` for a Hugging Face
            target, else ``"ours"``.
        on_disagreement: what to do with parameters that rules join and whose steps, options or groups differ:
            ``"refuse"``, or take the values of the ``"first"``.
        max_shard_bytes: limit of tensor bytes per data file.
        ranks: number of ranks that a native checkpoint is laid out for.
        granularity: texts for `parse_granularities`, with names of parameters relative to their layer.
        require_check: refuse a Hugging Face folder if it cannot be checked against the class that its config.json
            names.
        overwrite: replace the files in the target.
        resume: continue an interrupted run of the same conversion, or start if there was none.
        dry_run: check source and target, write nothing.
        part: the share of the files that this process writes, as (index, count); index counts from 0.
        memory_budget_bytes: bytes of all working buffers together.
        threads: threads that read and write at the same time.

    Raises:
        ConversionError: if there is no such part, or the memory budget has no room for one thread.

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
    max_shard_bytes: int = 5 * 10**9
    ranks: int = 1
    granularity: Sequence[str] = ()
    require_check: bool = False
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
                "There is no such part.",
                expected=f"--part I/N with 0 <= I < N, and N at most {_MAX_PARTS:,}",
                got=f"{index}/{count}",
                todo="number the parts from 0",
            )
        _ = self.limits  # refuses a budget that is too small, before anything is opened

    @property
    def limits(self) -> CopyLimits:
        """Memory and threads, as `CopyLimits`."""
        return CopyLimits(self.memory_budget_bytes, self.threads)

    def asked(self) -> dict[str, str]:
        """The options that determine the result, by the command line's names."""
        chosen = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in _HOW_IT_RUNS
        }
        texts = {
            name: " ".join(map(str, v)) if isinstance(v, (list, tuple)) else v for name, v in chosen.items()
        }
        names = {"max_shard_bytes": "max-shard-size"}
        return {f"--{names.get(name, name.replace('_', '-'))}": str(text) for name, text in texts.items()}
