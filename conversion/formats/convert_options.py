"""What a conversion is asked for, whatever its target: the options of `convert`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from vescale_fsdp.conversion.run_plan import RunOptions


@dataclass(frozen=True)
class ConvertOptions:
    """What the result shall be.

    Args:
        assets: folder or URL whose settings files are copied (Hugging Face target); None for the source's own if
            it is a Hugging Face folder.
        include_asset: patterns of files there that are copied although they are no settings.
        no_assets: nothing is copied, not even the source's own.
        model_prefix: what the model's names begin with in the source; None to detect it.
        prefix: what the model's names shall begin with in the result; None to keep the source's.
        dtype: casts, as texts for `CastRules.parse`.
        dequantize: the float type that quantised weights become; None to keep their codes and scales.
        quantize: schemes for weights, as texts for `QuantizeRules.parse`; what is quantised already is refused.
        merge: folder or URL of an adapter that is merged into the model (Hugging Face target); None for none.
        adapter_name: which of several adapters is written (adapter target).
        include, exclude: name patterns of the result.
        optimizer: one of `OPTIMIZER_FORMS`.
        rules: key rules: a shipped set's name or a TOML file; None to keep all names.
        rules_to: which side of the rules the result is, ``"hf"`` or ``"ours"``; None: hf for that target.
        on_disagreement: what to do with parameters that rules join and whose steps, options or groups differ:
            ``"refuse"``, or take those of the ``"first"``.
        max_shard_bytes: limit of tensor bytes per data file.
        ranks, granularity: what a native checkpoint is laid out for; texts for `parse_granularities`, with names
            as `fully_shard` of a layer knows them.
        require_check: refuse a Hugging Face folder for which nobody can say whether the class that its config.json
            names takes it.
        run: overwrite, resume, part, memory and threads.

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
    run: RunOptions = field(default_factory=RunOptions)

    def asked(self) -> dict[str, str]:
        """What was asked for, by the command line's names, as far as it decides the result."""
        names = {"max_shard_bytes": "max-shard-size"}
        chosen = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("run", "require_check")
        }
        texts = {
            name: " ".join(map(str, v)) if isinstance(v, (list, tuple)) else v for name, v in chosen.items()
        }
        return {f"--{names.get(name, name.replace('_', '-'))}": str(text) for name, text in texts.items()}
