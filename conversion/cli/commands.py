"""The commands of ``vescale-convert``: each calls one function of the library and prints its result.

The ``to-...`` commands are generated from the table of formats. To keep ``--help`` fast, the library's packages import
their modules on first use, and each command imports the modules that only this command needs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from vescale_fsdp import checkpoint, conversion
from vescale_fsdp.checkpoint.storage.progress import ProgressBar
from vescale_fsdp.conversion.cli.options import (
    COMBINE_OPTIONS,
    CONVERT_OPTIONS,
    FINGERPRINT_OPTIONS,
    JSON,
    MERGE_OPTIONS,
    MODEL_PREFIX,
    OF_LAYOUTS,
    OF_TRAINING,
    PLAN_OPTIONS,
    RECORDED,
    SOURCE_OPTIONS,
    TARGET_OPTIONS,
    TOLERANCE,
    Location,
    part_of,
    quiet_option,
    step_numbers,
    with_options,
)
from vescale_fsdp.conversion.formats.table import TARGETS, Target
from vescale_fsdp.errors import CorruptCheckpointError, counted, flags_in_messages, format_bytes, some

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint import Fingerprint, VerifyReport
    from vescale_fsdp.conversion.convert import ConvertReport
    from vescale_fsdp.conversion.convert_options import ConvertOptions
    from vescale_fsdp.conversion.engine.source import Source
    from vescale_fsdp.layout.plan_report import PlanReport
    from vescale_fsdp.planning.training_plan import TrainingPlan

_QUICK_MODULES = 100  # a model with this many modules is measured in about a second


class Stopped(click.Abort):
    """Ctrl-C was pressed while files were being written."""


def _print_versions(ctx: click.Context, param: click.Parameter, is_set: bool) -> None:
    """Print the installed versions, for bug reports; a callback of ``--version``. Does not import torch."""
    if is_set and not ctx.resilient_parsing:  # resilient_parsing: click is completing a command line
        import platform
        from importlib.metadata import version

        from vescale_fsdp.checkpoint.manifest.manifest import FORMAT_VERSION

        click.echo(
            f"vescale-convert {version('vescale-fsdp')}, checkpoint format {FORMAT_VERSION}, "
            f"torch {version('torch')}, Python {platform.python_version()}"
        )
        ctx.exit()


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Completion of commands and options, in ~/.bashrc: "
    'eval "$(_VESCALE_CONVERT_COMPLETE=bash_source vescale-convert)"; zsh_source and fish_source for those shells.',
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_versions,
    help="Print the versions of this package, its checkpoint format, torch and Python.",
)
def cli() -> None:
    """Convert checkpoints between formats, in bounded memory.

    \b
    vescale-convert inspect run
    vescale-convert to-hf run/step-00000020 repository --assets original_repository
    vescale-convert to-native repository checkpoint
    """
    click.get_current_context().with_resource(flags_in_messages())


def _open(src: str, step: int | None, **options: Any) -> Source:
    """Open a checkpoint; if it is a run folder, open the newest step unless ``step`` is given."""
    return conversion.open_source(src, step="newest" if step is None else step, **options)


def _open_to_convert(src: str, fields: Mapping[str, Any], **options: Any) -> Source:
    """Open a checkpoint to convert. If names are chosen, the files of others may be missing: see `Source.check_files`.

    Args:
        fields: fields of `ConvertOptions`.
        options: further arguments of `open_source`.
    """
    is_chosen = fields["include"] or fields["exclude"]
    return conversion.open_source(src, checks_files=not is_chosen, **options)


@cli.command("inspect")
@click.argument("src", type=Location())
@SOURCE_OPTIONS
@JSON
@click.option("--svg", type=Location(), help="Write a picture of a group's sharding to this file.")
@click.option("--layout", type=click.IntRange(0), help="Index of the group to draw; by default the largest.")
def inspect_command(
    src: str, as_json: bool, svg: str | None, layout: int | None, **source_options: Any
) -> None:
    """Print what the checkpoint SRC contains. Of a run folder, the latest step is used unless --step names one.

    If a native checkpoint lacks files, what its manifest lists is printed, then the problems; the exit code is 1.
    """
    from vescale_fsdp.checkpoint.storage.open import open_parent
    from vescale_fsdp.conversion.report.describe import describe, draw, format_description

    if layout is not None and svg is None:
        raise click.UsageError("--layout needs --svg")
    problems: Sequence[VerifyReport.Problem] = ()
    try:
        source = _open(src, **source_options)
    except CorruptCheckpointError:
        opened = _open_manifest(src, source_options["step"], source_options["kind"])
        if opened is None:
            raise
        source, problems = opened
    if svg is not None:
        picture = draw(source, layout)
        folder, name = open_parent(svg)
        # backslashreplace: tensor names from pickles may contain characters that UTF-8 cannot encode.
        folder.commit(name, picture.encode(errors="backslashreplace"), replace=True)
    description = describe(source)
    if as_json:
        given = {"problems": [str(each) for each in problems]} if problems else {}
        click.echo(json.dumps({**description, **given}, indent=2, default=repr))
    else:
        click.echo(format_description(description))
        _echo_problems(problems)
    sys.exit(1 if problems else 0)


def _echo_problems(problems: Sequence[VerifyReport.Problem]) -> None:
    """Print the first problems, and the number of the others."""
    for problem in problems[:_MOST]:
        click.echo(problem)
    if (more := len(problems) - _MOST) > 0:
        click.echo(f"and {more} more problems; --json lists all")


def _open_manifest(
    src: str, step: int | None, kind: str | None
) -> tuple[Source, Sequence[VerifyReport.Problem]] | None:
    """Open a native checkpoint that lacks files, by its manifest. Returns None if it is of another format."""
    from vescale_fsdp.checkpoint.manifest.file_names import manifest_file
    from vescale_fsdp.conversion.formats.detect import locate
    from vescale_fsdp.conversion.formats.native.source import open_native

    _, folder = locate(src, "newest" if step is None else step)
    if kind not in {None, "native"} or manifest_file(folder) is None:
        return None
    source = open_native(folder, checks_files=False)
    return source, checkpoint.verify(source, deep=False).problems


@cli.command("ls")
@click.argument("run", type=Location())
@JSON
def ls_command(run: str, as_json: bool) -> None:
    """List the steps of RUN, the folder of a CheckpointManager: size, age, seconds of the save, metric and state.

    A step is committed, pinned, abandoned by a rollback, damaged (its manifest cannot be read), or incomplete: its save
    runs or was interrupted. The data of a committed step may still be damaged: verify reads the data, ls does not.
    """
    from vescale_fsdp.conversion.report.describe import describe_run, format_run

    steps = describe_run(run)
    click.echo(json.dumps(steps, indent=2) if as_json else format_run(run, steps, time.time()))


@cli.command("verify")
@click.argument("src", type=Location())
@SOURCE_OPTIONS
@click.option("--quick", is_flag=True, help="Check headers and metadata only, not the data.")
@JSON
@quiet_option()
def verify_command(src: str, quick: bool, as_json: bool, quiet: bool, **source_options: Any) -> None:
    """Check that SRC is complete and undamaged: whole tensors, headers, index, and checksums of the data.

    If SRC is a run folder, its latest step is used unless --step names one. A problem's text names few of the tensors
    with damaged bytes; damaged_tensors of --json lists all.
    """
    try:
        source = _open(src, **source_options)
    except CorruptCheckpointError as damage:
        url, report = _verify_files(src, source_options["step"], source_options["kind"], quick, quiet, damage)
    else:
        url = source.url  # that of the step, if SRC is a run folder
        with ProgressBar(0 if quick else source.nbytes, quiet=quiet) as progress:
            report = checkpoint.verify(source, deep=not quick, progress=progress.advance)
    if as_json:
        numbers = {
            "url": url,
            "tensors": report.num_tensors,
            "nbytes": report.num_bytes,
            "checksums": report.num_checksums,
        }
        found = {
            "problems": [str(each) for each in report.problems],
            "damaged_tensors": report.damaged_tensors,
        }
        click.echo(json.dumps(numbers | found, indent=2))
    else:
        _echo_problems(report.problems)
        read = f"{format_bytes(report.num_bytes)} read, {counted(report.num_checksums, 'checksum')} compared"
        number = counted(len(report.problems), "problem")
        click.echo(f"{url}: {counted(report.num_tensors, 'tensor')}, {read}: {number}")
        if names := report.damaged_tensors:
            click.echo(f"{counted(len(names), 'tensor')} with damaged bytes; all names: --json")
    if source_options["step"] is None:
        _note_later_steps(src, url)
    sys.exit(1 if report.problems else 0)


def _note_later_steps(src: str, url: str) -> None:
    """Say on stderr which steps of the run ``src`` are later than its step at ``url``, and have no manifest."""
    from vescale_fsdp.checkpoint.manifest.file_names import parse_step_name
    from vescale_fsdp.checkpoint.steps.step_folders import torn_steps
    from vescale_fsdp.checkpoint.storage.open import open_storage

    root, _, name = url.rpartition("/")
    found = parse_step_name(name)
    if found is None or open_storage(src).where.rstrip("/") != root:  # SRC is no folder of a run
        return
    if torn := torn_steps(open_storage(root), after=found[0]):
        click.echo(
            f"not verified: later steps without a manifest: {some(map(str, torn))}. Their saves run or were "
            "interrupted, or their manifests were deleted: then put these back before the next save, which removes old "
            "data without a manifest",
            err=True,
        )


def _verify_files(
    src: str, step: int | None, kind: str | None, quick: bool, quiet: bool, damage: CorruptCheckpointError
) -> tuple[str, VerifyReport]:
    """Verify a checkpoint that cannot be opened because of ``damage``: a native one's manifest lists all files.

    Returns:
        Its path, as `Source.url` has it, and the report; in other formats ``damage`` is all that is known.
    """
    from vescale_fsdp.checkpoint.manifest.file_names import manifest_file
    from vescale_fsdp.checkpoint.verify_report import damage_report
    from vescale_fsdp.conversion.formats.detect import locate

    url, folder = locate(src, "newest" if step is None else step)
    if kind not in {None, "native"} or manifest_file(folder) is None:
        return folder.where, damage_report(damage, folder.where)
    with ProgressBar(0, quiet=quiet) as progress:
        return folder.where, checkpoint.verify(url, deep=not quick, progress=progress.advance)


@cli.command("diff")
@click.argument("a", type=Location())
@click.argument("b", type=Location())
@click.option("--rtol", type=TOLERANCE, default=0.0, help="Relative tolerance; bitwise without tolerances.")
@click.option("--atol", type=TOLERANCE, default=0.0, help="Absolute tolerance.")
@click.option("--ignore-dtype", is_flag=True, help="Compare floats of different types by value.")
@click.option("--model-only", is_flag=True, help="Compare the model only, not the optimizer or the rest.")
@RECORDED
@MODEL_PREFIX
@click.option("--all", "lists_all", is_flag=True, help="Print every difference on a line of its own.")
@JSON
@quiet_option()
def diff_command(
    a: str,
    b: str,
    rtol: float,
    atol: float,
    ignore_dtype: bool,
    model_only: bool,
    recorded: bool,
    model_prefix: str | None,
    lists_all: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare the tensors of A and B, whatever their formats. The exit code is 1 if they differ.

    If one side contains only a model, the optimizer and the rest of the other side are not compared, as a line says.
    Names that one side lacks are grouped by their first keys.
    """
    from vescale_fsdp.conversion.diff import compare, format_comparison

    left, right = conversion.open_source(a), conversion.open_source(b)
    with ProgressBar(left.nbytes + right.nbytes, quiet=quiet) as progress:
        found = compare(
            left,
            right,
            rtol=rtol,
            atol=atol,
            ignore_dtype=ignore_dtype,
            model_only=model_only,
            model_prefix=model_prefix,
            recorded=recorded,
            progress=progress.advance,
        )
    if as_json:
        listed = [difference.to_json() for difference in found.differences]
        left_out = [each._asdict() for each in found.left_out]
        numbers = {"compared": found.num_compared, "not_compared": left_out}
        click.echo(json.dumps({**numbers, "differences": listed}, indent=2))
    else:
        click.echo(format_comparison(found, None if lists_all else _MOST, "; --all or --json lists all"))
    sys.exit(1 if found.differences else 0)


@cli.command("fingerprint")
@click.argument("src", type=Location())
@click.argument("other", type=Location(), required=False)
@SOURCE_OPTIONS
@FINGERPRINT_OPTIONS
@JSON
@quiet_option()
def fingerprint_command(
    src: str,
    other: str | None,
    kind: str | None,
    trust_pickle: bool,
    step: int | None,
    names: str | None,
    recorded: bool,
    as_json: bool,
    quiet: bool,
    **fields: Any,
) -> None:
    """Print the fingerprint of SRC: equal for equal tensors in any format, cut and number of ranks.

    With OTHER, compare both: prints which tensors differ. The exit code is 1 if any do.
    """
    if fields["rules"] is not None and names is None:
        raise click.UsageError("--rules needs --names")
    target = {"hf": "hf", "ours": "native", None: None}[names]
    options = None
    if names is not None or any(fields.values()):
        options = conversion.ConvertOptions(rules_to=None if fields["rules"] is None else names, **fields)
    source = _open(src, step, kind=kind, trust_pickle=trust_pickle)
    sources = [source]
    if other is not None:  # --from and --step are those of SRC
        sources.append(conversion.open_source(other, trust_pickle=trust_pickle))
    with ProgressBar(sum(each.nbytes for each in sources), quiet=quiet) as progress:
        given: dict[str, Any] = {"recorded": recorded, "progress": progress.advance}
        found: tuple[Fingerprint, ...]
        if len(sources) == 1:
            found = (conversion.fingerprint_of(source, target, options, **given),)
        else:
            found = conversion.fingerprints_of(source, sources[1], target, options, **given)
    differing = found[0].differences(found[-1])
    if as_json:
        sides = [{"url": source.url, **each.to_json()} for source, each in zip(sources, found, strict=True)]
        click.echo(json.dumps({"sides": sides, "differing": differing}, indent=2))
    else:
        for source, each in zip(sources, found, strict=True):
            click.echo(f"{each}  {source.url}: {counted(len(each.tensors), 'tensor')}")
        if other is not None:
            differ = f"{counted(len(differing), 'tensor')} differ{'s' * (len(differing) == 1)}"
            click.echo(f"{differ}: {some(differing, _MOST)}" if differing else "equal")
    sys.exit(1 if differing else 0)


@cli.command("report")
@click.argument("src", type=Location())
@SOURCE_OPTIONS
@click.option(
    "--against", type=Location(), metavar="OTHER", help="Another checkpoint or step to compare with."
)
@click.option(
    "--steps",
    callback=step_numbers,
    metavar="N,N,..|all",
    help="Steps of the run to read and compare with each other, at most 12. all: up to 12 evenly spaced steps.",
)
@click.option(
    "--out", type=Location(), required=True, metavar="FILE", help="The page to write, such as report.html."
)
@quiet_option()
def report_command(
    src: str,
    trust_pickle: bool,
    against: str | None,
    steps: list[int] | Literal["all"] | None,
    out: str,
    quiet: bool,
    **source_options: Any,
) -> None:
    """Write an HTML page about SRC: its tensors, their statistics, which files store them, and the steps of its run.

    Any two steps of a run can be compared in the page: by recorded fingerprints, and those of --steps by values.
    """
    from vescale_fsdp.checkpoint.storage.open import open_parent
    from vescale_fsdp.conversion.report.checkpoint_report import checkpoint_report, report_page
    from vescale_fsdp.conversion.report.run_steps import removals_named, run_of, urls_of_steps

    if against is not None and steps is not None:
        raise click.UsageError("--against and --steps are two comparisons: make one page for each")
    source = _open(src, trust_pickle=trust_pickle, **source_options)
    other = conversion.open_source(against, trust_pickle=trust_pickle) if against is not None else None
    urls = [] if steps is None else urls_of_steps(source, steps)
    with removals_named([source.url, *urls] if run_of(source) is not None else ()):
        read = [conversion.open_source(url) for url in urls]
        nbytes = sum(each.nbytes for each in (source, other, *read) if each is not None)
        with ProgressBar(nbytes, quiet=quiet) as progress:
            page = report_page(checkpoint_report(source, other, steps=read, progress=progress.advance))
    folder, name = open_parent(out)
    # backslashreplace: tensor names from pickles may contain characters that UTF-8 cannot encode.
    folder.commit(name, page.encode(errors="backslashreplace"), replace=True)
    if not quiet:
        click.echo(f"wrote {out}: {counted(len(source.tensors), 'tensor')}, {format_bytes(source.nbytes)}")


@cli.command("plan")
@click.argument("src", type=Location())
@with_options(*PLAN_OPTIONS)
@click.option("--out", type=Location(), metavar="FOLDER", help="Write tables and pictures to this folder.")
@JSON
def plan_command(src: str, out: str | None, as_json: bool, **options: Any) -> None:
    """Print whether the model in SRC fits on GPUs, and how to shard it.

    With --gpus, SRC is a Hugging Face folder or a config.json, and no weights are read. The plan has the memory,
    traffic and least time of each way to shard the model, and the Python lines of the best one. With --shards, SRC
    is a checkpoint of any format, and the plan has layouts alone: bytes per rank, padding and copies.
    """
    if (options["shards"] is None) is (options["gpus"] is None):
        raise click.UsageError("--gpus or --shards is needed, and not both")
    unused = OF_LAYOUTS if options["shards"] is None else OF_TRAINING
    ctx = click.get_current_context()
    for name in unused:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            other = "--shards" if options["shards"] is None else "--gpus"
            raise click.UsageError(f"--{name.replace('_', '-')} needs {other}")
    report = _plan_training(src, options) if options["shards"] is None else _plan_layouts(src, options)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else str(report))
    for file in report.save(out) if out else ():
        click.echo(f"wrote {file}", err=True)


def _plan_layouts(src: str, options: Mapping[str, Any]) -> PlanReport:
    """Plan the layouts of the model in a checkpoint."""
    from vescale_fsdp.conversion.engine.carried_state import find_model
    from vescale_fsdp.layout.granularity import parse_granularities
    from vescale_fsdp.layout.model_shapes import natural_key
    from vescale_fsdp.layout.padding import PaddingPolicy
    from vescale_fsdp.layout.plan_report import plan_report

    source = conversion.open_source(src, **{name: options[name] for name in ("kind", "trust_pickle", "step")})
    model = find_model(source, options["model_prefix"])
    infos = {name: source.tensors[key].info for key, name in model.names.items()}
    return plan_report(
        {name: (infos[name].shape, infos[name].dtype.name) for name in sorted(infos, key=natural_key)},
        options["shards"],
        parse_granularities(options["granularity"]),
        units=options["unit"] or None,
        padding_policy=PaddingPolicy(scatter=options["scatter"]),
    )


def _plan_training(src: str, options: Mapping[str, Any]) -> TrainingPlan:
    """Plan the training of the model in a config.json."""
    import torch

    from vescale_fsdp.conversion.formats.huggingface.meta_model import meta_model, token_batch
    from vescale_fsdp.layout.granularity import parse_granularities
    from vescale_fsdp.planning.cluster import Cluster
    from vescale_fsdp.planning.training_plan import plan_training

    cluster = Cluster(**{name: options[name] for name in Cluster.__dataclass_fields__})
    model = meta_model(src).to(getattr(torch, options["weight_dtype"]))
    if len(list(model.modules())) > _QUICK_MODULES:
        click.echo("measuring activations on the meta device ..", err=True)
    return plan_training(
        model,
        cluster,
        batch=token_batch(model, options["tokens"]),
        optimizer=options["optimizer"],
        param_dtype=getattr(torch, options["param_dtype"]),
        checkpointing=options["checkpointing"],
        granularity=parse_granularities(options["granularity"]) or None,
        units=options["unit"] or None,
        micro_batches=options["micro_batches"],
    )


@cli.command("rules")
@click.option(
    "--suggest",
    "suggested",
    nargs=2,
    type=Location(),
    metavar="SRC MODEL",
    help="Print rules from the names in SRC to those in MODEL: a Hugging Face folder, a config.json or a checkpoint.",
)
@SOURCE_OPTIONS
@MODEL_PREFIX
def rules_command(
    suggested: tuple[str, str] | None, step: int | None, model_prefix: str | None, **options: Any
) -> None:
    """List the shipped key rules, or suggest a rule file for a checkpoint whose names differ from a model's."""
    if suggested is None:
        from vescale_fsdp.conversion.rules.rule_file import shipped_rules

        click.echo("\n".join(shipped_rules()))
        return
    from vescale_fsdp.conversion.suggest import suggest

    src, model = suggested
    click.echo(suggest(_open(src, step, **options), model, model_prefix), nl=False)


def _convert(
    target_kind: str,
    *,
    src: str,
    out: str,
    kind: str | None,
    trust_pickle: bool,
    step: int | None,
    part: str | None,
    as_json: bool,
    quiet: bool,
    **fields: Any,
) -> None:
    """Run one conversion and print a summary.

    Args:
        target_kind: the format to write.
        fields: fields of `ConvertOptions`, and ``adapter`` (write only the adapter) and ``push`` (where to upload).
    """
    repository = fields.pop("push", None)
    if repository is not None and (part is not None or "://" in out):
        raise click.UsageError("--push needs a local OUT that this process writes alone")
    if fields.pop("adapter", False):
        target_kind = "adapter"
    elif fields.get("adapter_name") is not None:
        raise click.UsageError("--adapter-name needs --adapter")
    options = _options(part, fields)
    if repository is not None:
        from vescale_fsdp.conversion.formats.huggingface.push import check_push, push

        check_push(repository)
    source = _open_to_convert(src, fields, kind=kind, trust_pickle=trust_pickle, step=step)
    _write(partial(conversion.convert, source, out, target_kind, options), [source], as_json, quiet)
    if repository is not None and not options.dry_run:
        url = push(out, repository)
        if not quiet:
            click.echo(f"pushed: {url}", err=as_json)


def _options(part: str | None, fields: dict[str, Any]) -> ConvertOptions:
    """Return the options of a command line; ``fields`` are those of `ConvertOptions`."""
    if fields["rules_to"] is not None and fields["rules"] is None:
        raise click.UsageError("--rules-to needs --rules")
    if fields.get("no_assets") and fields["assets"] is not None:
        raise click.UsageError("--no-assets and --assets exclude each other")
    if part is None and "RANK" in os.environ:
        # RANK alone does not select a part: a training script may run this command on rank 0 only.
        click.echo("RANK is set and --part is not: this process writes all files", err=True)
    return conversion.ConvertOptions(part=(0, 1) if part is None else part_of(part), **fields)


def _write(run: Callable[..., ConvertReport], sources: Sequence[Source], as_json: bool, quiet: bool) -> None:
    """Run a conversion of these sources with a progress bar, and print a summary."""
    try:
        with ProgressBar(sum(source.nbytes for source in sources), quiet=quiet) as progress:
            report = run(progress=progress.advance, announce=progress.announce)
    except KeyboardInterrupt as error:  # only a conversion can be resumed; other commands write no journal
        raise Stopped from error
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if report.check is not None and report.check.how == "not checked":
        click.echo(f"not checked whether a model class loads it: {report.check.reason}", err=True)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    elif not quiet:
        click.echo(report)


def _add_target(kind: str, target: Target) -> None:
    """Add the ``to-...`` command of a target. A function, since each command must keep its own ``kind``."""

    @cli.command(target.command, help=target.summary)
    @CONVERT_OPTIONS
    @with_options(*(TARGET_OPTIONS[name] for name in target.options))
    def command(**arguments: Any) -> None:
        _convert(kind, **arguments)


for _kind, _target in TARGETS.items():
    if _target.command:
        _add_target(_kind, _target)


@cli.command("merge-adapter")
@MERGE_OPTIONS
@with_options(*(TARGET_OPTIONS[name] for name in ("include_asset", "no_assets", "require_check")))
def merge_command(**arguments: Any) -> None:
    """Write BASE with ADAPTER merged into it to OUT as a Hugging Face repository.

    ADAPTER is a peft folder: LoRA (also with rslora, DoRA, or patterns of rank and alpha) or IA3. In float32 the result
    is bitwise equal to that of peft's merge_and_unload, with one exception: if the adapter changes a tied weight, the
    tie is removed, so that the merged model computes the same as base and adapter. Memory holds one matrix at a time.
    """
    _convert("hf", **arguments)


# Options of targets that an average or a combination, which has no optimizer, may have.
_COMBINE_TARGET_OPTIONS = (
    "prefix",
    "ranks",
    "granularity",
    "include_asset",
    "no_assets",
    "require_check",
    "fingerprint",
)


def _combine(
    call: Callable[..., Callable[..., ConvertReport]],
    sources: Sequence[Source],
    *,
    out: str,
    to: str | None,
    compute_dtype: str | None,
    copy: tuple[str, ...],
    part: str | None,
    as_json: bool,
    quiet: bool,
    **fields: Any,
) -> None:
    """Run an average or a combination.

    Args:
        call: takes the arguments after the sources; returns the conversion without its progress.
        fields: fields of `ConvertOptions`.
    """
    by_command = {
        target.command.removeprefix("to-"): kind for kind, target in TARGETS.items() if target.command
    }
    kind = sources[0].kind if to is None else by_command[to]
    if kind not in by_command.values():
        raise click.UsageError(
            f"The format of the first checkpoint, {kind}, is only read: pass --to, such as --to hf."
        )
    given = click.get_current_context().get_parameter_source
    for name in _COMBINE_TARGET_OPTIONS:
        if name not in TARGETS[kind].options and given(name) is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(
                f"Option --{name.replace('_', '-')} is not an option of {TARGETS[kind].command}."
            )
    options = _options(part, fields)
    _write(call(out, kind, options, compute_dtype=compute_dtype, copy=copy), sources, as_json, quiet)


@cli.command("average")
@click.argument("paths", nargs=-1, metavar="CHECKPOINT...", type=Location(), required=True)
@click.argument("out", type=Location())
@click.option("--last", type=click.IntRange(2), help="Use the newest steps of a run, the newest first.")
@COMBINE_OPTIONS
@with_options(*(TARGET_OPTIONS[name] for name in _COMBINE_TARGET_OPTIONS))
def average_command(
    paths: tuple[str, ...],
    last: int | None,
    kind: str | None,
    trust_pickle: bool,
    step: int | None,
    **rest: Any,
) -> None:
    """Write the mean of the models in several CHECKPOINTs to OUT.

    Sums are computed in float32, in the given order, and rounded once. Names, types and settings files are those of the
    first CHECKPOINT. Only the model is written.
    """
    from vescale_fsdp.conversion.formats.detect import last_steps  # not for --help

    if last is not None and (len(paths) > 1 or step is not None):
        raise click.UsageError("Option --last needs one folder of a run, and no --step.")
    steps = [step] * len(paths) if last is None else last_steps(paths[0], last)
    urls = paths if last is None else paths * last
    sources = [
        _open_to_convert(url, rest, kind=kind, trust_pickle=trust_pickle, step=number)
        for url, number in zip(urls, steps, strict=True)
    ]
    _combine(partial(partial, conversion.average, sources), sources, **rest)


@cli.command("combine")
@click.argument("out", type=Location())
@click.argument("expression")
@click.argument("inputs", nargs=-1, metavar="NAME=CHECKPOINT...", required=True)
@COMBINE_OPTIONS
@with_options(*(TARGET_OPTIONS[name] for name in _COMBINE_TARGET_OPTIONS))
def combine_command(
    expression: str,
    inputs: tuple[str, ...],
    kind: str | None,
    trust_pickle: bool,
    step: int | None,
    **rest: Any,
) -> None:
    """Write EXPRESSION, such as 'base + 0.7 * (tuned - base)', of the models in several checkpoints to OUT.

    EXPRESSION has names, numbers, + - * / and parentheses, and is computed in float32 as Python computes it, with one
    rounding at the end. Order, types and settings files are those of the first checkpoint. Only the model is written.
    """
    pairs = [text.partition("=") for text in inputs]
    if odd := [text for text, (name, _, path) in zip(inputs, pairs, strict=True) if not name or not path]:
        raise click.UsageError(f"This is not NAME=CHECKPOINT: {odd[0]!r}.")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise click.UsageError("Two checkpoints have the same name.")
    sources = {
        name: _open_to_convert(
            os.path.expanduser(path), rest, kind=kind, trust_pickle=trust_pickle, step=step
        )
        for name, _, path in pairs
    }
    _combine(partial(partial, conversion.combine, sources, expression), [*sources.values()], **rest)


# By command: its line in the list of all commands, which click cuts at 80 columns, and examples.
SUMMARIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "inspect": (
        "Print what the checkpoint SRC contains.",
        ("inspect run", "inspect run/step-00000020 --json"),
    ),
    "ls": ("List the steps of RUN.", ("ls run", "ls s3://bucket/run --json")),
    "verify": (
        "Check that SRC is complete and undamaged.",
        ("verify run/step-00000020", "verify model.safetensors --quick"),
    ),
    "diff": ("Compare the tensors of A and B.", ("diff run/step-00000010 repository --rtol 1e-6",)),
    "fingerprint": (
        "Print the fingerprint of SRC, or compare it with OTHER's.",
        (
            "fingerprint run/step-00000020",
            "fingerprint run/step-00000020 repository",
            "fingerprint run/step-00000020 repository --names hf --rules torchtitan-0.2-llama --dtype bf16",
        ),
    ),
    "report": (
        "Write an HTML page about SRC.",
        ("report run --out report.html", "report run --steps 10,20 --out report.html"),
    ),
    "plan": (
        "Print whether a model fits on GPUs, and how to shard it.",
        (
            "plan repository --gpus 64 --memory 80G --checkpointing",
            "plan repository --shards 8,64,512 --granularity rows:32 --out pictures",
        ),
    ),
    "rules": (
        "List the shipped key rules, or suggest a rule file.",
        ("rules", "rules --suggest run/step-00000020 original_repository"),
    ),
    "to-native": (
        "Write SRC to OUT as a native checkpoint.",
        ("to-native repository checkpoint", "to-native s3://bucket/global_step500 checkpoint --resume"),
    ),
    "to-zarr": (
        "Write SRC to OUT as a native checkpoint in zarr v3 form.",
        ("to-zarr run/step-00000020 arrays",),
    ),
    "to-fsdp2": (
        "Write SRC to OUT as a torch.distributed.checkpoint folder.",
        ("to-fsdp2 run/step-00000020 dcp --optimizer flattened",),
    ),
    "to-hf": (
        "Write the model in SRC to OUT as a Hugging Face repository.",
        (
            "to-hf run/step-00000020 repository --assets original_repository",
            "to-hf run/step-00000020 repository --assets original_repository --dtype bf16 --memory-budget 256MiB",
        ),
    ),
    "to-torch": ("Write SRC to the file OUT as torch.save would.", ("to-torch run/step-00000020 model.pt",)),
    "merge-adapter": (
        "Merge a peft adapter into its base model.",
        ("merge-adapter original_repository adapter_folder merged",),
    ),
    "average": (
        "Write the mean of several checkpoints.",
        ("average run averaged --last 5", "average one two three averaged --to hf --dtype bf16"),
    ),
    "combine": (
        "Write an expression of several checkpoints.",
        (
            "combine merged 'base + 0.7 * (tuned - base)' base=original_repository tuned=run/step-00000020 --to hf",
        ),
    ),
}
EXIT_CODES = "Exit codes: 0 done, 1 refused, failed or different, 2 wrong usage, 130 stopped by Ctrl-C."

for _name, _command in cli.commands.items():
    _command.short_help, _examples = SUMMARIES[_name]
    # \b: click keeps the lines of this paragraph.
    _lines = "\n".join(f"  vescale-convert {example}" for example in _examples)
    _command.epilog = f"\b\nExamples:\n{_lines}\n\n{EXIT_CODES}"


_MOST = 20  # names per line, and problems of `verify`; ``--json`` lists all
