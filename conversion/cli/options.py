"""The arguments and options of ``vescale-convert``.

The Python name of an option of the ``to-..`` commands, such as ``max_shard_bytes`` for ``--max-shard-size``, is a field
of `ConvertOptions`. The options of the source, ``as_json`` and ``quiet`` are arguments of
`commands._convert` instead, and ``adapter`` selects a target.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any, Literal

import click

from vescale_fsdp.conversion.formats.table import FORMATS, OPTIMIZER_FORMS, TARGETS
from vescale_fsdp.errors import ConversionError

_MAX_STEP_DIGITS = 18
_MAX_RANK_DIGITS = 7  # planning time grows with the number of digits, which would otherwise be unlimited


def part_of(text: str) -> tuple[int, int]:
    """Parse the value of ``--part``: ``I/N``, or ``env`` for torchrun's environment variables RANK and WORLD_SIZE.

    Returns:
        The index of the part, counted from 0, and the number of parts.

    Raises:
        ConversionError: for any other text, or if ``env`` is given and these variables are not set.
    """
    if text.strip() == "env":
        rank, count = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if not (rank.isdecimal() and count.isdecimal()):
            raise ConversionError(
                "--part env needs the environment variables of torchrun.",
                expected="numbers in RANK and WORLD_SIZE, as torchrun sets them",
                got=f"RANK={rank!r}, WORLD_SIZE={count!r}",
                where="--part env",
                todo="start the command with torchrun, or pass --part I/N",
            )
        return int(rank), int(count)
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None:
        raise ConversionError(
            "This is not a valid part.", expected="I/N, or env", got=repr(text), todo="write 0/4, for example"
        )
    return int(match[1]), int(match[2])


# Bytes per unit: KB and K are decimal (1000), KiB is binary (1024).
_UNITS = {"": 1, "B": 1} | {
    unit + end: base**power
    for power, unit in enumerate("KMGT", 1)
    for end, base in (("B", 1000), ("", 1000), ("IB", 1024))
}


class Size(click.ParamType[int]):
    """A number of bytes: ``5GB`` (decimal), ``512MiB`` (binary) or ``1000000``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):  # click requires that a type accepts its own results
            return value
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            self.fail(f"{value!r} is not a size such as 5GB, 512MiB or 1000000.", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].upper()])


class FiniteRange(click.FloatRange):
    """A range of finite numbers, for tolerances; click's FloatRange accepts ``nan`` and ``inf``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a tolerance.", param, ctx)
        return number


class Location(click.ParamType[str]):
    """A path or URL. ``~`` is expanded here, since shells do not expand it in ``--assets=~/x`` or in quotes."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value.strip():  # probably an unset shell variable
            self.fail(f"{value!r} is not a path.", param, ctx)
        return os.path.expanduser(value)


class RulesOption(click.Option):
    """The option ``--rules``. Its help text lists the shipped rules; the folder is read only when help is printed."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from vescale_fsdp.conversion.rules.rule_file import shipped_rules

        self.help = f"Key rules to apply: {', '.join(shipped_rules())}, or a TOML file."
        return super().get_help_record(ctx)


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def quiet_option(text: str = "Print no progress.") -> Decorator:
    """Return the option ``--quiet``. With it, waits for a store are not logged either; errors are."""

    def silence(ctx: click.Context, param: click.Parameter, quiet: bool) -> bool:
        import logging  # not for --help, which prints no progress

        for module in ("first_answer", "remote"):
            logger = logging.getLogger(f"vescale_fsdp.checkpoint.storage.{module}")
            logger.setLevel(logging.ERROR if quiet else logging.NOTSET)
        return quiet

    return click.option("-q", "--quiet", is_flag=True, callback=silence, help=text)


def with_options(*options: Decorator) -> Decorator:
    """Combine several options into one decorator; ``--help`` lists them in the given order."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):  # click lists the option that was applied last first
            command = option(command)
        return command

    return decorate


def positive_numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> list[int] | None:
    """Parse a list of positive numbers such as ``8,64,512``; a callback for `click.option`."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= _MAX_RANK_DIGITS and int(part) for part in parts):
        raise click.BadParameter(
            f"{text!r} is not a list of positive numbers such as 8,64,512, each with at most seven digits."
        )
    return [int(part) for part in parts]


def step_numbers(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> list[int] | Literal["all"] | None:
    """Parse numbers of steps such as ``0,100,200``, or ``all``; a callback for `click.option`."""
    if text is None or text == "all":
        return "all" if text else None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= _MAX_STEP_DIGITS for part in parts):
        raise click.BadParameter(f"{text!r} is neither a list of steps such as 100,200 nor all.")
    return [int(part) for part in parts]


def _float_type(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Return torch's name of a float type."""
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[value]


TOLERANCE = FiniteRange(0)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
MODEL_PREFIX = click.option(
    "--model-prefix",
    "--model",
    "model_prefix",
    help="Prefix of the model's names, such as 'model.'; selects one of several models.",
)
GRANULARITY = click.option(
    "--granularity",
    multiple=True,
    metavar="[PATTERN=]RULE",
    help="Granularity, such as rows:32; a pattern overrides the global rule (repeatable). Default: element.",
)
RECORDED = click.option(
    "--recorded",
    is_flag=True,
    help="Trust the fingerprints that saves have recorded; do not read those tensors.",
)
SOURCE_OPTIONS = with_options(
    click.option(
        "--from", "kind", type=click.Choice(tuple(FORMATS)), help="Format of SRC; detected by default."
    ),
    click.option("--trust-pickle", is_flag=True, help="Let pickles in SRC import and run code."),
    click.option("--step", type=click.IntRange(0), help="Step to use if SRC is the folder of a whole run."),
)
# Options of `plan`: for both kinds of plans, for layouts alone, and for training.
_LAYOUT_OPTIONS: dict[str, Decorator | None] = {
    "kind": None,
    "trust_pickle": None,
    "step": None,
    "model_prefix": None,
    "scatter": click.option(
        "--scatter",
        type=click.Choice(["auto", "never"]),
        default="auto",
        show_default=True,
        help="Whether the planner may scatter a few tensors to save padding.",
    ),
}
_TRAINING_OPTIONS: dict[str, Decorator] = {
    "per_node": click.option(
        "--per-node", type=click.IntRange(1), default=8, show_default=True, help="GPUs per node."
    ),
    "memory_bytes": click.option(
        "--memory",
        "memory_bytes",
        type=Size(),
        default="80GB",
        show_default=True,
        help="Memory of a GPU. 80G and 80GB are 80e9 bytes (74.5 GiB); an H100 or A100 sold as 80 GB has more, "
        "79GiB (see nvidia-smi).",
    ),
    "on_cpu": click.option("--on-cpu", is_flag=True, help="Plan for ranks on the CPU instead of GPUs."),
    "optimizer": click.option(
        "--optimizer",
        type=click.Choice(["adamw", "adamw8bit", "muon", "none"]),
        default="adamw",
        show_default=True,
        help="Optimizer: torch's AdamW, or AdamW8bit or Muon of this package.",
    ),
    "param_dtype": click.option(
        "--param-dtype",
        type=click.Choice(["bf16", "fp16", "fp32"]),
        callback=_float_type,
        default="bf16",
        show_default=True,
        help="Type of compute and of gathered weights: param_dtype of a MixedPrecisionPolicy. Gradients are reduced "
        "in fp32.",
    ),
    "weight_dtype": click.option(
        "--weight-dtype",
        type=click.Choice(["bf16", "fp32"]),
        callback=_float_type,
        default="fp32",
        show_default=True,
        help="Type in which weights and the optimizer's state are stored.",
    ),
    "tokens": click.option(
        "--tokens",
        type=click.IntRange(1),
        default=8192,
        show_default=True,
        help="Tokens per GPU and micro-batch, as one sequence.",
    ),
    "micro_batches": click.option(
        "--micro-batches",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Forwards and backwards per step.",
    ),
    "checkpointing": click.option(
        "--checkpointing", is_flag=True, help="Recompute the activations of each block in the backward."
    ),
    "flops_per_s": click.option(
        "--flops", "flops_per_s", type=FiniteRange(1), default=989e12, help="FLOP/s of a GPU (989e12: H100)."
    ),
    "memory_bytes_per_s": click.option(
        "--memory-bandwidth",
        "memory_bytes_per_s",
        type=Size(),
        default="3.35TB",
        show_default=True,
        help="Per second, of a GPU.",
    ),
    "link_bytes_per_s": click.option(
        "--link-bandwidth",
        "link_bytes_per_s",
        type=Size(),
        default="450GB",
        show_default=True,
        help="Per second, GPU and direction, inside a node.",
    ),
    "network_bytes_per_s": click.option(
        "--network-bandwidth",
        "network_bytes_per_s",
        type=Size(),
        default="50GB",
        show_default=True,
        help="Per second, GPU and direction, between nodes.",
    ),
}
OF_LAYOUTS, OF_TRAINING = tuple(_LAYOUT_OPTIONS), tuple(_TRAINING_OPTIONS)
PLAN_OPTIONS: tuple[Decorator, ...] = (
    click.option("--gpus", type=click.IntRange(1), metavar="N", help="Plan the training on so many GPUs."),
    click.option(
        "--shards",
        callback=positive_numbers,
        metavar="N,N,..",
        help="Plan layouts alone, over these numbers of ranks, such as 8,64.",
    ),
    *_TRAINING_OPTIONS.values(),
    GRANULARITY,
    click.option(
        "--unit",
        multiple=True,
        metavar="NAME",
        help="A module to wrap, such as 'model.layers.*' (repeatable).",
    ),
    SOURCE_OPTIONS,
    MODEL_PREFIX,
    *(option for option in _LAYOUT_OPTIONS.values() if option is not None),
)
_CHOICE_OPTIONS = with_options(  # which tensors, and under which types
    MODEL_PREFIX,
    click.option(
        "--assets",
        "--config",
        type=Location(),
        help="Folder with config.json and tokenizer. to-hf copies them; key rules read sizes from config.json.",
    ),
    click.option(
        "--include", multiple=True, metavar="PATTERN", help="Write only names that match (repeatable)."
    ),
    click.option("--exclude", multiple=True, metavar="PATTERN", help="Skip matching names (repeatable)."),
    click.option(
        "--dtype",
        "--as",
        multiple=True,
        metavar="[PATTERN=]TYPE",
        help="Cast the model's floats; a pattern overrides the global type (repeatable).",
    ),
)
FINGERPRINT_OPTIONS = with_options(
    _CHOICE_OPTIONS,
    click.option("--rules", cls=RulesOption, type=Location(), metavar="NAME|FILE"),
    click.option(
        "--names",
        type=click.Choice(["hf", "ours"]),
        help="Names, shapes and order of elements of the tensors: those of a Hugging Face repository, or the other "
        "side of the rules. Default: SRC's own.",
    ),
    RECORDED,
)
WRITING_OPTIONS = with_options(
    SOURCE_OPTIONS,
    _CHOICE_OPTIONS,
    click.option(
        "--dequantize",
        metavar="TYPE",
        help="Convert quantized weights (fp8, mxfp4, bitsandbytes, compressed-tensors) to this float type.",
    ),
    click.option(
        "--quantize",
        multiple=True,
        metavar="[PATTERN=]SCHEME",
        help="Quantize weights to fp8-128x128 or mxfp4; PATTERN=keep leaves some as they are (repeatable).",
    ),
    click.option("--rules", cls=RulesOption, type=Location(), metavar="NAME|FILE"),
    click.option(
        "--rules-to",
        type=click.Choice(["hf", "ours"]),
        help="Names that OUT gets: Hugging Face's, or the other side of the rules.",
    ),
    click.option(
        "--on-disagreement",
        type=click.Choice(["refuse", "first"]),
        default="refuse",
        show_default=True,
        help="What to do if rules join parameters whose steps, learning rates or groups differ.",
    ),
    click.option(
        "--max-shard-size",
        "max_shard_bytes",
        type=Size(),
        default="5GB",
        show_default=True,
        help="Maximum size of a data file.",
    ),
    click.option(
        "--memory-budget",
        "memory_budget_bytes",
        type=Size(),
        default="512MiB",
        show_default=True,
        help="Maximum memory for all buffers.",
    ),
    click.option(
        "--threads", type=click.IntRange(1), default=4, show_default=True, help="Threads that read and write."
    ),
    click.option("--overwrite", is_flag=True, help="Replace the files in OUT."),
    click.option("--resume", is_flag=True, help="Continue an interrupted run that had the same options."),
    click.option(
        "--part",
        metavar="I/N|env",
        help="Write only part I of N, counted from 0; env takes torchrun's RANK and WORLD_SIZE.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan; write nothing."),
    JSON,
    quiet_option("Print no progress and no summary."),
)
CONVERT_OPTIONS = with_options(
    click.argument("src", type=Location()), click.argument("out", type=Location()), WRITING_OPTIONS
)
MERGE_OPTIONS = with_options(
    click.argument("src", metavar="BASE", type=Location()),
    click.argument("merge", metavar="ADAPTER", type=Location()),
    click.argument("out", type=Location()),
    WRITING_OPTIONS,
)
# Options of `average` and `combine`.
COMBINE_OPTIONS = with_options(
    click.option(
        "--to",
        type=click.Choice(
            [target.command.removeprefix("to-") for target in TARGETS.values() if target.command]
        ),
        help="Format of OUT; by default that of the first input.",
    ),
    click.option(
        "--compute-dtype",
        type=click.Choice(["float32", "float64"]),
        help="Type of all operations; by default float32, and float64 where an input is float64.",
    ),
    click.option(
        "--copy",
        multiple=True,
        metavar="PATTERN",
        help="Copy matching tensors from the first input (repeatable).",
    ),
    WRITING_OPTIONS,
)
# Options of some targets only. The keys are the names that `Target.options` lists in the table of formats.
TARGET_OPTIONS = {
    "prefix": click.option(
        "--prefix", help="Prefix of the model's names in OUT; '' writes them without one."
    ),
    "optimizer": click.option(
        "--optimizer",
        type=click.Choice(OPTIMIZER_FORMS),
        default="keep",
        show_default=True,
        help="Form of the optimizer state.",
    ),
    "ranks": click.option(
        "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Number of ranks to shard for."
    ),
    "granularity": GRANULARITY,
    "adapter": click.option(
        "--adapter",
        is_flag=True,
        help="Write only the adapter, as a peft folder; --assets must contain its adapter_config.json.",
    ),
    "adapter_name": click.option("--adapter-name", help="Adapter to write if SRC contains several."),
    "no_assets": click.option(
        "--no-assets", is_flag=True, help="Do not copy config or tokenizer files, not even SRC's own."
    ),
    "require_check": click.option(
        "--require-check",
        is_flag=True,
        help="Fail if it cannot be checked whether the class in config.json loads the result.",
    ),
    "fingerprint": click.option(
        "--fingerprint",
        is_flag=True,
        help="Record fingerprints in the result; reads the written files once more.",
    ),
    "push": click.option(
        "--push",
        metavar="ORG/MODEL",
        help="Then upload OUT, a local folder, to the Hub as one commit; ORG/MODEL@BRANCH to a branch.",
    ),
    "include_asset": click.option(
        "--include-asset",
        multiple=True,
        metavar="PATTERN",
        help="Also copy other files of --assets that match (repeatable).",
    ),
}
