"""The ``vescale-convert`` command: parses, calls one library function, prints.

    vescale-convert inspect CHECKPOINT
    vescale-convert to-hf CHECKPOINT OUT --assets FOLDER_WITH_CONFIG_AND_TOKENIZER

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 refused or failed, 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from tqdm import tqdm

from vescale_fsdp.conversion.copying import CopyLimits, Progress
from vescale_fsdp.conversion.inspection import describe, format_bytes, format_description
from vescale_fsdp.conversion.open_source import KINDS, open_source
from vescale_fsdp.conversion.sizes import parse_bytes
from vescale_fsdp.conversion.to_hf import HfOptions, HfReport, to_hf
from vescale_fsdp.errors import ConversionError, VescaleError

__all__ = ["main"]


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


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="vescale-fsdp")
def cli() -> None:
    """Convert checkpoints between formats, in bounded memory."""


def _source_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option(
            "--trust-pickle", is_flag=True, help="Let pickles in SRC import and run what they name."
        ),
        click.option("--from", "kind", type=click.Choice(KINDS), help="Format of SRC, instead of looking."),
    ):
        command = option(command)
    return command


@cli.command("inspect")
@click.argument("src")
@_source_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def inspect_command(src: str, kind: str | None, trust_pickle: bool, as_json: bool) -> None:
    """Print what the checkpoint SRC holds."""
    found = describe(open_source(src, kind=kind, trust_pickle=trust_pickle))
    click.echo(json.dumps(found, indent=2) if as_json else format_description(found))


@cli.command("to-hf")
@click.argument("src")
@click.argument("out")
@_source_options
@click.option(
    "--assets", "--config", help="Folder whose config, tokenizer and other settings files go along."
)
@click.option("--model-prefix", help="What the model's names begin with in SRC, such as 'model.'.")
@click.option(
    "--max-shard-size", type=_Size(), default="5GB", show_default=True, help="Limit per weight file."
)
@click.option("--memory-budget", type=_Size(), default="512MiB", show_default=True, help="For all buffers.")
@click.option("--threads", type=click.IntRange(1), default=4, show_default=True, help="Readers and writers.")
@click.option("--overwrite", is_flag=True, help="Replace the weights in OUT if it has files.")
@click.option("--dry-run", is_flag=True, help="Print the plan, write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no summary.")
def to_hf_command(
    src: str,
    out: str,
    kind: str | None,
    trust_pickle: bool,
    assets: str | None,
    model_prefix: str | None,
    max_shard_size: int,
    memory_budget: int,
    threads: int,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the model in SRC to OUT as a Hugging Face repository."""
    source = open_source(src, kind=kind, trust_pickle=trust_pickle)
    options = HfOptions(
        assets=assets,
        model_prefix=model_prefix,
        max_shard_bytes=max_shard_size,
        overwrite=overwrite,
        dry_run=dry_run,
        limits=CopyLimits(memory_budget, threads),
    )
    with _progress_bar(quiet=quiet) as progress:
        report = to_hf(source, out, options, source_url=src, progress=progress)
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    elif not quiet:
        click.echo(_summary(report))


@contextmanager
def _progress_bar(*, quiet: bool) -> Iterator[Progress]:
    """Bytes on stderr; nothing if that is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    lock = threading.Lock()
    with tqdm(unit="B", unit_scale=True, file=sys.stderr) as bar:

        def advance(nbytes: int) -> None:
            with lock:
                bar.update(nbytes)

        yield advance


def _summary(report: HfReport) -> str:
    verb = "wrote" if report.written else "would write"
    tensors = sum(len(shard.infos) for shard in report.shards)
    lines = [
        f"source: {report.source_kind} at {report.source}, model prefix {report.model_prefix or '(root)'}",
        f"{verb} {tensors} tensors, {format_bytes(report.nbytes)}, to {report.target}",
        f"files: {len(report.shards)} with weights, {len(report.assets)} with settings",
    ]
    if report.dropped_optimizer:
        lines.append(f"left out: {report.dropped_optimizer} optimizer entries (a model repository has none)")
    if report.dropped_others:
        lines.append(f"left out: {', '.join(report.dropped_others)}")
    lines += [f"left out: {twin} (tied to {kept})" for twin, kept in report.tied]
    return "\n".join(lines)


def main() -> None:
    """Entry point: errors that say what to do become one message and exit code 1."""
    try:
        cli(prog_name="vescale-convert")
    except (VescaleError, OSError) as error:
        click.echo(f"vescale-convert: {error}", err=True)
        sys.exit(1)
