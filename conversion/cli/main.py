"""The ``vescale-convert`` command: parses, calls one library function, prints.

    vescale-convert inspect CHECKPOINT
    vescale-convert to-hf CHECKPOINT OUT --assets FOLDER_WITH_CONFIG_AND_TOKENIZER
    vescale-convert plan CHECKPOINT --shards 8,64,512 --granularity rows:32 --out PICTURES

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 refused or failed, 2 wrong usage,
130 stopped by hand.
What one command alone needs is imported by that command, since imports would take longer than small work.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from vescale_fsdp.conversion.checks.byte_sizes import format_bytes, parse_bytes
from vescale_fsdp.conversion.cli.summary import summary
from vescale_fsdp.conversion.convert import OPTIMIZER_FORMS, ConvertOptions, convert
from vescale_fsdp.conversion.formats.detect import KINDS, open_source
from vescale_fsdp.conversion.output.copying import CopyLimits
from vescale_fsdp.conversion.output.run_plan import Part, RunOptions
from vescale_fsdp.conversion.places import open_store, split_file
from vescale_fsdp.errors import ConversionError, VescaleError

if TYPE_CHECKING:
    from vescale_fsdp.layout.planner import Scatter

__all__ = ["cli", "main"]


class _Size(click.ParamType[int]):
    """Bytes with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ConversionError as error:
            self.fail(str(error), param, ctx)


class _Location(click.ParamType[str]):
    """A path or URL; ``~`` is the home folder, which shells leave as it is in ``--assets=~/x`` and in quotes."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return os.path.expanduser(value)


class _RulesOption(click.Option):
    """Names the shipped rules in its help, and looks for them only then."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from vescale_fsdp.conversion.rules.rule_file import shipped_rules

        self.help = f"Key rules: {', '.join(shipped_rules())}, or TOML."
        return super().get_help_record(ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="vescale-fsdp")
def cli() -> None:
    """Convert checkpoints between formats, in bounded memory."""


def _options(*options: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_source_options = _options(
    click.option("--from", "kind", type=click.Choice(KINDS), help="Format of SRC, instead of looking."),
    click.option("--trust-pickle", is_flag=True, help="Let pickles in SRC import and run what they name."),
)
_model_prefix_option = click.option(
    "--model-prefix",
    help="What the model's names begin with, such as 'model.' or one of several models' names.",
)
_TOLERANCE = click.FloatRange(0)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_convert_options = _options(
    click.argument("src", type=_Location()),
    click.argument("out", type=_Location()),
    _source_options,
    _model_prefix_option,
    click.option(
        "--assets",
        "--config",
        type=_Location(),
        help="Folder with config.json, tokenizer, ...: goes along to-hf; key rules take sizes from it.",
    ),
    click.option("--include", multiple=True, metavar="PATTERN", help="Only matching names (repeatable)."),
    click.option("--exclude", multiple=True, metavar="PATTERN", help="No matching names (repeatable)."),
    click.option(
        "--dtype",
        multiple=True,
        metavar="[PATTERN=]TYPE",
        help="Cast floats of the model; a pattern wins over the global type (repeatable).",
    ),
    click.option("--rules", cls=_RulesOption, type=_Location(), metavar="NAME|FILE"),
    click.option("--rules-to", type=click.Choice(["hf", "ours"]), help="The side of the rules OUT shall be."),
    click.option(
        "--max-shard-size", type=_Size(), default="5GB", show_default=True, help="Limit per data file."
    ),
    click.option(
        "--memory-budget", type=_Size(), default="512MiB", show_default=True, help="For all buffers."
    ),
    click.option(
        "--threads", type=click.IntRange(1), default=4, show_default=True, help="Readers and writers."
    ),
    click.option("--overwrite", is_flag=True, help="Replace what is in OUT."),
    click.option("--resume", is_flag=True, help="Go on where an interrupted run with these options stopped."),
    click.option(
        "--part", metavar="I/N", help="Write only share I of N (from 0); torchrun sets it by itself."
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan, write nothing."),
    _json_option,
    click.option("-q", "--quiet", is_flag=True, help="No progress and no summary."),
)


_granularity_option = click.option(
    "--granularity",
    multiple=True,
    metavar="[PATTERN=]RULE",
    help="Such as rows:32; a pattern wins over the global rule (repeatable). Default: element.",
)
_state_options = _options(
    click.option("--prefix", help="Put the model under this prefix; '' puts it at the root."),
    click.option(
        "--optimizer", type=click.Choice(OPTIMIZER_FORMS), default="keep", show_default=True, help="Its form."
    ),
)


@cli.command("inspect")
@click.argument("src", type=_Location())
@_source_options
@_json_option
@click.option("--svg", type=_Location(), help="Draw how a group is sharded, to this file.")
@click.option("--layout", type=click.IntRange(0), help="Which group to draw; default the largest.")
def inspect_command(
    src: str, kind: str | None, trust_pickle: bool, as_json: bool, svg: str | None, layout: int | None
) -> None:
    """Print what the checkpoint SRC holds."""
    from vescale_fsdp.conversion.checks.describe import describe, draw, format_description

    if layout is not None and svg is None:
        raise click.UsageError("--layout says what --svg FILE draws, which is missing")
    source = open_source(src, kind=kind, trust_pickle=trust_pickle)
    if svg is not None:
        picture = draw(source, layout)
        folder, name = split_file(svg)
        open_store(folder).write_file(name, picture.encode())
    found = describe(source)
    click.echo(json.dumps(found, indent=2) if as_json else format_description(found))


@cli.command("verify")
@click.argument("src", type=_Location())
@_source_options
@click.option("--quick", is_flag=True, help="Headers and metadata only; do not read the data.")
@_json_option
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def verify_command(
    src: str, kind: str | None, trust_pickle: bool, quick: bool, as_json: bool, quiet: bool
) -> None:
    """Check that SRC is whole: coverage, headers, index, and the checksums of its data."""
    from vescale_fsdp.conversion.checks.verify import verify

    source = open_source(src, kind=kind, trust_pickle=trust_pickle)
    with _Progress(0 if quick else source.nbytes, quiet=quiet) as progress:
        report = verify(source, deep=not quick, progress=progress.advance)
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        for problem in report.problems:
            click.echo(problem)
        read = f"{format_bytes(report.nbytes)} read, {report.checksums} checksums compared"
        click.echo(f"{report.tensors} tensors, {read}: {len(report.problems)} problems")
    sys.exit(1 if report.problems else 0)


@cli.command("diff")
@click.argument("a", type=_Location())
@click.argument("b", type=_Location())
@click.option("--rtol", type=_TOLERANCE, default=0.0, help="Relative tolerance; bitwise without one.")
@click.option("--atol", type=_TOLERANCE, default=0.0, help="Absolute tolerance.")
@click.option("--ignore-dtype", is_flag=True, help="Compare floats of different types as numbers.")
@click.option("--model-only", is_flag=True, help="Leave optimizer and other tensors alone.")
@_model_prefix_option
@_json_option
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def diff_command(
    a: str,
    b: str,
    rtol: float,
    atol: float,
    ignore_dtype: bool,
    model_only: bool,
    model_prefix: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare the tensors of A and B, whatever their formats; exit code 1 if they differ."""
    from vescale_fsdp.conversion.checks.diff import Tolerance, diff

    left, right = open_source(a), open_source(b)
    with _Progress(left.nbytes + right.nbytes, quiet=quiet) as progress:
        tolerance = Tolerance(rtol, atol, ignore_dtype)
        found, compared = diff(
            left,
            right,
            tolerance=tolerance,
            model_only=model_only,
            model_prefix=model_prefix,
            progress=progress.advance,
        )
    if as_json:
        click.echo(json.dumps({"compared": compared, "differences": [d.to_json() for d in found]}, indent=2))
    else:
        for difference in found:
            click.echo(f"{difference.kind:<7} {difference.name}: {difference.text}")
        click.echo(f"{compared} tensors compared, {len(found)} differences")
    sys.exit(1 if found else 0)


@cli.command("plan")
@click.argument("src", type=_Location())
@_source_options
@_model_prefix_option
@click.option("--shards", required=True, metavar="N,N,..", help="Sizes of the sharding mesh axis.")
@_granularity_option
@click.option("--unit", multiple=True, metavar="NAME", help="A wrapped module, such as 'model.layers.*'.")
@click.option("--scatter", type=click.Choice(["auto", "never"]), default="auto", show_default=True)
@click.option("--out", type=_Location(), metavar="FOLDER", help="Write tables and pictures here.")
@_json_option
def plan_command(
    src: str,
    kind: str | None,
    trust_pickle: bool,
    model_prefix: str | None,
    shards: str,
    granularity: tuple[str, ...],
    unit: tuple[str, ...],
    scatter: Scatter,
    out: str | None,
    as_json: bool,
) -> None:
    """Print how fully_shard would lay out the model in SRC over so many ranks, and what it would cost."""
    from vescale_fsdp.conversion.state.model_names import find_model
    from vescale_fsdp.layout.granularity import parse_granularities
    from vescale_fsdp.layout.padding import PaddingPolicy
    from vescale_fsdp.layout.report.model_shapes import natural_order
    from vescale_fsdp.layout.report.plan_report import plan_report

    source = open_source(src, kind=kind, trust_pickle=trust_pickle)
    infos = {name: source.tensors[key].info for key, name in find_model(source, model_prefix).names.items()}
    shapes = {name: (infos[name].shape, infos[name].dtype.name) for name in sorted(infos, key=natural_order)}
    report = plan_report(
        shapes,
        _numbers(shards),
        parse_granularities(granularity),
        units=unit or None,
        padding_policy=PaddingPolicy(scatter=scatter),
    )
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else str(report))
    for file in report.save(out) if out else ():
        click.echo(f"wrote {file}", err=True)


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise click.BadParameter(f"{text!r} is no list of numbers such as 8,64,512", param_hint="--shards")
    return [int(part) for part in parts]


@cli.command("to-hf")
@_convert_options
@click.option(
    "--include-asset",
    multiple=True,
    metavar="PATTERN",
    help="A file of the --assets that goes along although it is no setting (repeatable).",
)
def to_hf_command(**arguments: Any) -> None:
    """Write the model in SRC to OUT as a Hugging Face repository."""
    _convert("hf", **arguments)


@cli.command("to-fsdp2")
@_convert_options
@_state_options
def to_fsdp2_command(**arguments: Any) -> None:
    """Write SRC to OUT as a stock torch.distributed.checkpoint folder, which FSDP2 loads."""
    _convert("dcp", **arguments)


@cli.command("to-torch")
@_convert_options
@_state_options
def to_torch_command(**arguments: Any) -> None:
    """Write SRC to the file OUT as torch.save would."""
    _convert("torch", **arguments)


@cli.command("to-zarr")
@_convert_options
@_state_options
def to_zarr_command(**arguments: Any) -> None:
    """Write SRC to OUT as a native checkpoint in its zarr v3 form, one array per tensor."""
    _convert("zarr", **arguments)


@cli.command("to-vescale")
@_convert_options
@_state_options
@click.option(
    "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Laid out for so many ranks."
)
@_granularity_option
def to_vescale_command(**arguments: Any) -> None:
    """Write SRC to OUT as a native checkpoint."""
    _convert("native", **arguments)


def _convert(
    target_kind: str,
    *,
    src: str,
    out: str,
    kind: str | None,
    trust_pickle: bool,
    max_shard_size: int,
    memory_budget: int,
    threads: int,
    overwrite: bool,
    resume: bool,
    part: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **others: Any,
) -> None:
    """Run one conversion and print what it did; ``others`` are fields of `ConvertOptions`."""
    if others["rules_to"] is not None and others["rules"] is None:
        raise click.UsageError("--rules-to says which side of --rules OUT shall be, which are missing")
    run = RunOptions(
        overwrite=overwrite,
        resume=resume,
        dry_run=dry_run,
        part=Part.parse(part) if part else Part.from_environment(),
        limits=CopyLimits(memory_budget, threads),
    )
    source = open_source(src, kind=kind, trust_pickle=trust_pickle)
    options = ConvertOptions(max_shard_bytes=max_shard_size, run=run, **others)
    try:
        with _Progress(source.nbytes, quiet=quiet) as progress:
            report = convert(
                source, out, target_kind, options, progress=progress.advance, announce=progress.announce
            )
    except KeyboardInterrupt as error:
        raise _Stopped from error
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    elif not quiet:
        click.echo(summary(report))


class _Stopped(click.Abort):
    """Ctrl-C came while files were being written."""


class _Progress:
    """Bytes on stderr; nothing if that is no terminal."""

    def __init__(self, total_bytes: int, *, quiet: bool) -> None:
        self._bar = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, file=sys.stderr)
        self._lock = threading.Lock()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def announce(self, total_bytes: int) -> None:
        """What there is to do, once it is known."""
        if self._bar is not None:
            self._bar.reset(total_bytes)

    def advance(self, nbytes: int) -> None:
        """From any thread."""
        if self._bar is not None:
            with self._lock:
                self._bar.update(nbytes)


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def main() -> None:
    """Entry point: errors that say what to do become one message and exit code 1, Ctrl-C exit code 130.

    A second Ctrl-C ends the process at once, whatever it waits for: what is on the disk is as safe as after a crash.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as shells start jobs in the background
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = _run()
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:  # else the process is about to end, and may at once
            signal.signal(signal.SIGINT, before)
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _run() -> int:
    """The exit code of the command line, after its messages."""
    try:
        return cli(prog_name="vescale-convert", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        _print_error(error.format_message())
        return error.exit_code
    except click.Abort as error:
        todo = "\n  what to do: nothing has its final name; if files were finished, go on with --resume"
        return _fail(f"stopped{todo if isinstance(error, _Stopped) else ''}", 130)
    except VescaleError as error:
        return _fail(str(error))
    except (
        BrokenPipeError
    ):  # whoever read our output has seen enough; Python would complain of it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error}{_what_to_do(error)}")


def _fail(message: str, code: int = 1) -> int:
    click.echo(f"vescale-convert: {message}", err=True)
    _print_error(message)
    return code


def _print_error(message: str) -> None:
    """Whoever asked for JSON gets some from a failure too."""
    if "--json" in sys.argv[1:]:
        click.echo(json.dumps({"error": message}))


def _what_to_do(error: OSError) -> str:
    if "what to do" in str(error):
        return ""
    if error.errno in _NO_ROOM:
        return "\n  what to do: make room; if files were finished, go on with --resume"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "\n  what to do: check who may read the source and write to the target"
    return "\n  what to do: check the paths and the disk; if files were finished, go on with --resume"
