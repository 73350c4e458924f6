"""The entry point of ``vescale-convert``: runs a command, prints errors, sets the exit code.

    vescale-convert inspect CHECKPOINT
    vescale-convert to-hf CHECKPOINT OUT --assets FOLDER_WITH_CONFIG_AND_TOKENIZER
    vescale-convert plan CHECKPOINT --shards 8,64,512 --granularity rows:32 --out PICTURES

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 refused or failed, 2 wrong usage,
130 stopped by Ctrl-C.
"""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import signal
import sys
from types import FrameType

import click

from vescale_fsdp.conversion.cli.commands import Stopped, cli
from vescale_fsdp.errors import VescaleError

_RESUME = "if files were finished, continue with --resume"
_RESUMABLE = ("to-", "merge-")  # prefixes of the commands that have --resume
_TODO = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room"),
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EISDIR: "choose another path: a folder has this name",
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "choose another path: a file is in the place of a folder"),
    errno.ELOOP: "choose another path: it contains a circle of links",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
}


def main() -> None:
    """Run ``vescale-convert``. An error becomes one message and exit code 1, Ctrl-C becomes exit code 130.

    A second Ctrl-C ends the process at once. Files on the disk are then as safe as after a crash.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names in pickles may contain characters that cannot be encoded; stderr escapes them by default.
        sys.stdout.reconfigure(errors="backslashreplace")
    gc.disable()  # objects live until the command ends, and scanning the objects of a large plan takes seconds
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # shells ignore SIGINT in background jobs
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = _run()
    finally:
        # After the first Ctrl-C the default handler is set, and must stay: a second one ends the process.
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, before)
    gc.freeze()  # else the interpreter scans all objects once more at exit
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends the process at once
    raise KeyboardInterrupt


def _run() -> int:
    """Run the command line and print its errors; returns the exit code."""
    try:
        return cli(prog_name="vescale-convert", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        _print_error(error.format_message())
        return error.exit_code
    except click.Abort as error:
        todo = f"\n  what to do: no file has its final name yet; {_RESUME}"
        return _fail(f"stopped{todo if isinstance(error, Stopped) else ''}", 130)
    except VescaleError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader of the output, such as `head`, has ended. Python would report the same error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{_what_happened(error)}{_what_to_do(error)}")


def _fail(message: str, code: int = 1) -> int:
    click.echo(f"vescale-convert: {message}", err=True)
    _print_error(message)
    return code


def _print_error(message: str) -> None:
    """With ``--json``, print the error as JSON too."""
    if "--json" in sys.argv[1:]:  # the command line may not have been parsed
        click.echo(json.dumps({"error": message}))


def _what_happened(error: OSError) -> str:
    """The system's message as a sentence, and the file that it is about."""
    if not error.strerror:
        return str(error)
    file = error.filename2 if error.filename2 is not None else error.filename
    where = "" if file is None else f"\n  where: {os.fsdecode(file) if isinstance(file, bytes) else file}"
    return f"{error.strerror[:1].upper()}{error.strerror[1:].rstrip('.')}.{where}"


def _what_to_do(error: OSError) -> str:
    # Only the first word is the command; a path may start with the same letters.
    resume = f"; {_RESUME}" if any(word.startswith(_RESUMABLE) for word in sys.argv[1:2]) else ""
    if "what to do" in str(error):
        # The message has its own advice; a lost connection can be resumed as well.
        return resume if isinstance(error, ConnectionError) else ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "\n  what to do: check who may read the source and write to the target"
    todo = _TODO.get(error.errno or 0, "check the paths and the disk")
    return f"\n  what to do: {todo}{resume}"
