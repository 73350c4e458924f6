"""The entry point of ``vescale-convert``: runs a command, tells errors, gives the exit code.

    vescale-convert inspect CHECKPOINT
    vescale-convert to-hf CHECKPOINT OUT --assets FOLDER_WITH_CONFIG_AND_TOKENIZER
    vescale-convert plan CHECKPOINT --shards 8,64,512 --granularity rows:32 --out PICTURES

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 refused or failed, 2 wrong usage,
130 stopped by hand.
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
_RESUMABLE = ("to-", "merge-")  # how the commands begin that have --resume
_TODO = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room"),
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EISDIR: "name a file: a folder is there",
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "name another place: a file is where a folder would be"),
    errno.ELOOP: "name another place: links go in a circle there",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
}


def main() -> None:
    """Entry point: errors that say what to do become one message and exit code 1, Ctrl-C exit code 130.

    A second Ctrl-C ends the process at once, whatever it waits for: what is on the disk is as safe as after a crash.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: names of pickles may be no text
    gc.disable()  # what a command makes lives to its end; looking through all of a large plan costs seconds
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as shells start jobs in the background
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = _run()
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:  # else the process is about to end, and may at once
            signal.signal(signal.SIGINT, before)
    gc.freeze()  # or the interpreter looks through it all the same before it ends
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
        todo = f"\n  what to do: nothing has its final name yet; {_RESUME}"
        return _fail(f"stopped{todo if isinstance(error, Stopped) else ''}", 130)
    except VescaleError as error:
        return _fail(str(error))
    except (
        BrokenPipeError
    ):  # whoever read our output has seen enough; Python would complain of it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{_what_happened(error)}{_what_to_do(error)}")


def _fail(message: str, code: int = 1) -> int:
    click.echo(f"vescale-convert: {message}", err=True)
    _print_error(message)
    return code


def _print_error(message: str) -> None:
    """Whoever asked for JSON gets some from a failure too."""
    if "--json" in sys.argv[1:]:
        click.echo(json.dumps({"error": message}))


def _what_happened(error: OSError) -> str:
    """The system's words as a sentence, and which file they are about."""
    if not error.strerror:
        return str(error)
    file = error.filename2 if error.filename2 is not None else error.filename
    place = "" if file is None else f"\n  where: {os.fsdecode(file) if isinstance(file, bytes) else file}"
    return f"{error.strerror[:1].upper()}{error.strerror[1:].rstrip('.')}.{place}"


def _what_to_do(error: OSError) -> str:
    resume = f"; {_RESUME}" if any(word.startswith(_RESUMABLE) for word in sys.argv[1:2]) else ""
    if "what to do" in str(error):
        return resume if isinstance(error, ConnectionError) else ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "\n  what to do: check who may read the source and write to the target"
    todo = _TODO.get(error.errno or 0, "check the paths and the disk")
    return f"\n  what to do: {todo}{resume}"
