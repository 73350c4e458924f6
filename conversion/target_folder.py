"""Where a conversion may write, and what has its final name when.

    state                     data files          other files
    before                    absent, or the old ones if overwriting
    while converting          .NAME.partial       a journal
    killed                    .NAME.partial       the journal: --resume goes on
    failed                    (removed)           (removed, and the folders that were made)
    done                      NAME                old weights and journal removed, index last

Object stores cannot rename: there each object appears whole when its upload ends, the deciding one last, and an
old result's index goes before the first new object comes.
"""

from __future__ import annotations

from collections.abc import Callable

from vescale_fsdp.checkpoint.storage.base import Storage
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.open import open_parent, open_store
from vescale_fsdp.conversion.journal import is_journal
from vescale_fsdp.errors import ConversionError


def open_target(
    url: str,
    *,
    source_url: str,
    single_file: bool,
    overwrite: bool,
    resume: bool,
    is_result: Callable[[Storage], bool],
) -> tuple[Storage, str, list[str]]:
    """The store a target is written to, the file's name if the target is one file, and the old files in it.

    Args:
        is_result: whether what is there may be the result of the same conversion.

    Raises:
        ConversionError: if the target is over, inside or around the source, of the wrong kind, or not empty
            (leftovers of an interrupted run do not count when resuming): where writing could harm anything.
    """
    target, source = open_store(url).place, open_store(source_url).place
    shared = min(len(target), len(source))
    # A single file has nothing inside it, so only being inside the source, or the source, is harmful.
    if target[:shared] == source[:shared] and not (single_file and len(target) < len(source)):
        expected = "a place outside of the source, and not around it"
        raise _refusal(url, expected, f"the source is {source_url}", "choose another target")
    store, name = open_parent(url) if single_file else (open_store(url), "")
    if isinstance(store, LocalStorage):
        in_the_way = next((path for path in (store.root, *store.root.parents) if path.is_file()), None)
        if in_the_way is not None:
            raise _refusal(url, "a folder", f"a file {in_the_way}", "choose another target")
    path = store.root / name if isinstance(store, LocalStorage) else None
    if path is not None and path.exists() and not (path.is_dir() or path.is_file()):
        raise _refusal(url, "a new name, or that of a file", "a device or a pipe", "choose another target")
    if single_file and (not name or (isinstance(store, LocalStorage) and (store.root / name).is_dir())):
        raise _refusal(url, "a file", "a folder", "add a file name to the target")
    ours = dict.fromkeys((name, store.working_name(name), f".{name}.vescale-convert.jsonl"))
    files = [file for file in ours if store.size(file) is not None] if single_file else store.list_files()
    interrupted = any(is_journal(file) for file in files)
    blocking = files if not resume else [file for file in files if not is_leftover(file)]
    if blocking and not overwrite and not (resume and interrupted) and not is_result(store):
        todo = (
            "continue the interrupted conversion with --resume, or start over with --overwrite"
            if interrupted
            else "choose another target, or pass --overwrite to replace what is there"
        )
        some = ", ".join(blocking[:3])
        raise _refusal(url, "an empty or new target", f"{len(blocking)} files: {some}", todo)
    return store, name, files


def is_leftover(name: str) -> bool:
    """Whether a file was left by an interrupted conversion."""
    base = name.rpartition("/")[2]
    return is_journal(name) or (base.startswith(".") and base.endswith(".partial"))


def refuse_other_result(url: str) -> ConversionError:
    """What is in the target has the files of this conversion, with other bytes."""
    return _refusal(
        url,
        "the result of this conversion, or of one that was interrupted",
        "that of another, or of a source that has changed",
        "choose another target, or pass --overwrite to replace what is there",
    )


def _refusal(url: str, expected: str, got: str, todo: str) -> ConversionError:
    return ConversionError(
        "The result cannot be written there.", expected=expected, got=got, where=url, todo=todo
    )
