"""The console command ``vescale-convert``, run in the process of the test."""

from __future__ import annotations

from collections.abc import Mapping

import click
from click.testing import CliRunner, Result

from vescale_fsdp.conversion.cli.commands import cli

COMMANDS: Mapping[str, click.Command] = cli.commands  # name -> arguments and options


def vescale_convert(*args: object, catch_exceptions: bool = True) -> Result:
    """Run ``vescale-convert ARGS``; the result holds the exit code, what was printed, and the exception if any."""
    return CliRunner().invoke(cli, [str(arg) for arg in args], catch_exceptions=catch_exceptions)
