"""The entry point of ``vescale-convert``: runs a command, prints errors, sets the exit code.

    vescale-convert inspect CHECKPOINT
    vescale-convert to-hf CHECKPOINT OUT --assets FOLDER_WITH_CONFIG_AND_TOKENIZER
    vescale-convert plan HF_FOLDER --gpus 64 --memory 80G
    vescale-convert plan CHECKPOINT --shards 8,64,512 --granularity rows:32 --out PICTURES

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 refused, failed or different,
2 wrong usage, 130 stopped by Ctrl-C.
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
_RESUMABLE = ("to-", "merge-", "average", "combine")  # prefixes of the commands that have --resume
# errno -> advice for the user, in an error's "what to do" line.
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

    A second Ctrl-C kills the process without cleaning up; ``--resume`` then works as after a crash.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a stream that replaces stdout may lack `reconfigure`
        # Tensor names from pickles may contain characters that stdout cannot encode; stderr escapes them by default.
        sys.stdout.reconfigure(errors="backslashreplace")
    gc.disable()  # objects live until the command ends, and garbage collections of a large plan take seconds
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # shells ignore SIGINT in background jobs
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = _run()
    finally:
        # After a Ctrl-C, the default handler is installed and must stay, so that a second Ctrl-C ends the process.
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, before)
    gc.freeze()  # without it, the interpreter would scan all objects in a last collection at exit
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle the first Ctrl-C: raise KeyboardInterrupt."""
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
        # The reader of stdout, such as `head`, has exited. Python flushes stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{_what_happened(error)}{_what_to_do(error)}")


def _fail(message: str, code: int = 1) -> int:
    """Print an error message; returns the exit code ``code``."""
    click.echo(f"vescale-convert: {message}", err=True)
    _print_error(message)
    return code


def _print_error(message: str) -> None:
    """With ``--json``, also print the error as JSON."""
    if "--json" in sys.argv[1:]:  # sys.argv: after a usage error, click has no parsed options
        click.echo(json.dumps({"error": message}))


def _what_happened(error: OSError) -> str:
    """Format the operating system's message as a sentence, followed by the path of the file."""
    if not error.strerror:  # raised by a library with a message only
        return str(error)
    # filename2 is the target of a rename or a link.
    file = error.filename2 if error.filename2 is not None else error.filename
    where = "" if file is None else f"\n  where: {os.fsdecode(file) if isinstance(file, bytes) else file}"
    return f"{error.strerror[:1].upper()}{error.strerror[1:].rstrip('.')}.{where}"


def _what_to_do(error: OSError) -> str:
    """Format the advice for an error of the operating system; empty if the error contains its own advice."""
    # Only the first argument is the command; a path may also start with "to-".
    resume = f"; {_RESUME}" if any(word.startswith(_RESUMABLE) for word in sys.argv[1:2]) else ""
    if "what to do" in str(error):
        # The message contains its own advice. After a lost connection, --resume is possible too.
        return resume if isinstance(error, ConnectionError) else ""
    if isinstance(error, PermissionError) and not error.strerror:  # the answer of an object store
        return f"\n  what to do: check the credentials, and what they may read and write{resume}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "\n  what to do: check who may read the source and write to the target"
    todo = _TODO.get(error.errno or 0, "check the paths and the disk")
    return f"\n  what to do: {todo}{resume}"
