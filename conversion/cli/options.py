"""The arguments and options of ``vescale-convert``, those that commands share once."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any

import click

from vescale_fsdp.conversion.formats.table import OPTIMIZER_FORMS
from vescale_fsdp.errors import ConversionError
from vescale_fsdp.formats import FORMATS

_MANY_DIGITS = (
    8  # of a number of ranks; planning takes time with its logarithm, and there is no end to digits
)


def part_of(text: str) -> tuple[int, int]:
    """Index and count from ``I/N``, or from torchrun's environment variables for ``env``.

    Raises:
        ConversionError: for any other text, and for an environment without these variables.
    """
    if text.strip() == "env":
        rank, count = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if not (rank.isdecimal() and count.isdecimal()):
            raise ConversionError(
                "The environment does not say which part is wanted.",
                expected="RANK and WORLD_SIZE, numbers, as torchrun sets them",
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


_UNITS = {"": 1, "B": 1} | {
    unit + end: base**power
    for power, unit in enumerate("KMGT", 1)
    for end, base in (("B", 1000), ("", 1000), ("IB", 1024))
}


class Size(click.ParamType[int]):
    """A number of bytes: ``5GB`` (decimal), ``512MiB`` (binary) or ``1000000``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            self.fail(f"{value!r} is not a size such as 5GB, 512MiB or 1000000.", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].upper()])


class FiniteRange(click.FloatRange):
    """Numbers that can be compared with: nothing is above or below nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no tolerance.", param, ctx)
        return number


class Location(click.ParamType[str]):
    """A path or URL; ``~`` is the home folder, which shells leave as it is in ``--assets=~/x`` and in quotes."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value.strip():  # as from a variable of the shell that is not set
            self.fail(f"{value!r} is no path.", param, ctx)
        return os.path.expanduser(value)


class RulesOption(click.Option):
    """Names the shipped rules in its help, and looks for them only then."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from vescale_fsdp.conversion.rules.rule_file import shipped_rules

        self.help = f"Key rules to apply: {', '.join(shipped_rules())}, or a TOML file."
        return super().get_help_record(ctx)


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def with_options(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order of the help."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def positive_numbers(ctx: click.Context, param: click.Parameter, text: str) -> list[int]:
    """A list such as ``8,64,512``; the callback of an option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < _MANY_DIGITS and int(part) for part in parts):
        raise click.BadParameter(
            f"{text!r} is not a list of numbers such as 8,64,512, of seven digits at most."
        )
    return [int(part) for part in parts]


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
    help="Such as rows:32; a pattern overrides the global rule (repeatable). Default: element.",
)
SOURCE_OPTIONS = with_options(
    click.option(
        "--from", "kind", type=click.Choice(tuple(FORMATS)), help="Format of SRC; detected by default."
    ),
    click.option("--trust-pickle", is_flag=True, help="Let pickles in SRC import and run code."),
    click.option(
        "--step", type=click.IntRange(0), help="Which step, if SRC is the folder around a run's steps."
    ),
)
WRITING_OPTIONS = with_options(
    SOURCE_OPTIONS,
    MODEL_PREFIX,
    click.option(
        "--assets",
        "--config",
        type=Location(),
        help="Folder with config.json and tokenizer: to-hf copies them, key rules take sizes from them.",
    ),
    click.option("--include", multiple=True, metavar="PATTERN", help="Only names that match (repeatable)."),
    click.option("--exclude", multiple=True, metavar="PATTERN", help="Skip matching names (repeatable)."),
    click.option(
        "--dtype",
        multiple=True,
        metavar="[PATTERN=]TYPE",
        help="Cast the model's floats; a pattern overrides the global type (repeatable).",
    ),
    click.option(
        "--dequantize",
        metavar="TYPE",
        help="Make quantised weights floats of this type: fp8, mxfp4, bitsandbytes, compressed-tensors.",
    ),
    click.option(
        "--quantize",
        multiple=True,
        metavar="[PATTERN=]SCHEME",
        help="Make weights fp8-128x128 or mxfp4; PATTERN=keep leaves some (repeatable).",
    ),
    click.option("--rules", cls=RulesOption, type=Location(), metavar="NAME|FILE"),
    click.option("--rules-to", type=click.Choice(["hf", "ours"]), help="Which side of the rules OUT is on."),
    click.option(
        "--on-disagreement",
        type=click.Choice(["refuse", "first"]),
        default="refuse",
        show_default=True,
        help="If rules join parameters whose steps, learning rates or groups differ.",
    ),
    click.option(
        "--max-shard-size", type=Size(), default="5GB", show_default=True, help="Largest data file."
    ),
    click.option(
        "--memory-budget", type=Size(), default="512MiB", show_default=True, help="All buffers together."
    ),
    click.option(
        "--threads", type=click.IntRange(1), default=4, show_default=True, help="Threads that read and write."
    ),
    click.option("--overwrite", is_flag=True, help="Replace what is in OUT."),
    click.option("--resume", is_flag=True, help="Continue an interrupted run that had the same options."),
    click.option(
        "--part",
        metavar="I/N|env",
        help="Write only part I of N, counted from 0; env takes torchrun's RANK and WORLD_SIZE.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan; write nothing."),
    JSON,
    click.option("-q", "--quiet", is_flag=True, help="Print no progress and no summary."),
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
# What some targets have beside those, by their names in the table of formats.
TARGET_OPTIONS = {
    "prefix": click.option("--prefix", help="Put the model under this prefix; '' puts it at the root."),
    "optimizer": click.option(
        "--optimizer",
        type=click.Choice(OPTIMIZER_FORMS),
        default="keep",
        show_default=True,
        help="Form of the optimizer state.",
    ),
    "ranks": click.option(
        "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Lay out for this many ranks."
    ),
    "granularity": GRANULARITY,
    "adapter": click.option(
        "--adapter",
        is_flag=True,
        help="Write the adapter alone, as a folder of peft; --assets has its adapter_config.json.",
    ),
    "adapter_name": click.option("--adapter-name", help="Which adapter, if SRC holds several."),
    "no_assets": click.option(
        "--no-assets", is_flag=True, help="Do not copy config or tokenizer files, not even SRC's own."
    ),
    "require_check": click.option(
        "--require-check",
        is_flag=True,
        help="Fail where nobody can say whether the class in config.json takes the result.",
    ),
    "include_asset": click.option(
        "--include-asset",
        multiple=True,
        metavar="PATTERN",
        help="Also copy files of --assets that match, even if they hold no settings (repeatable).",
    ),
}
