"""`LocalStorage`: local and shared file systems, with parallel positional writes, fsync, and rename to commit.

In a folder that all users can write to (``/dev/shm``, ``/tmp``), another user may create a file of a predictable name
first: a folder with other weights, which a job would restore, or a link to a file of the job's user, which a write
would destroy. Private folders are therefore checked before every use, and links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from vescale_fsdp.checkpoint.storage.base import (
    ALLOW_WRITES,
    Buffer,
    FileInfo,
    FileReader,
    FileWriter,
    MadeFolders,
    Storage,
    bad_root,
)
from vescale_fsdp.checkpoint.storage.file_system import (
    FileSystemProbe,
    is_cached,
    is_probe,
    move_over,
    rename_unless_there,
    reserve,
    sync_names,
)
from vescale_fsdp.checkpoint.storage.lock_file import LOCK_FILE_NAME, held_by_file
from vescale_fsdp.errors import CheckpointError, StorageError

# Flags of new descriptors. O_NOFOLLOW: see above. O_CLOEXEC: child programs must not inherit them.
_APPEND = os.O_CREAT | os.O_NOFOLLOW | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
_MAKE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_MAX_BUFFERS = 1024  # maximum number of buffers of one preadv or pwritev on Linux (IOV_MAX)
_MAX_OPEN_FILES = 96  # per process, since descriptors are limited; further files are opened for every read
_slots = threading.Semaphore(_MAX_OPEN_FILES)  # one per file that stays open
_LOCK_NAME = ".lock"
_TEMPORARY = ".tmp"  # suffix of temporary names
LOCK_NAMES = (_LOCK_NAME, LOCK_FILE_NAME)  # files that locks leave in a folder
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# Errors of file systems that do not support flock.
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_NETWORK_FILE_SYSTEM = re.compile(  # file system types as /proc/self/mounts names them
    r"nfs4?|lustre|gpfs|beegfs|ceph|cifs|smb3|9p|wekafs|pvfs2|glusterfs|afs"
    r"|fuse\.(glusterfs|juicefs|ceph|sshfs|s3fs|gcsfuse|weka)"
)
_locked_files: set[int] = set()  # file descriptors of locks
_MADV_POPULATE_READ = 22  # from Linux's headers (5.14 and later); Python's mmap has no name for it


def _close_locked_files() -> None:
    """Close lock files in a forked child, because a child that outlives its parent would keep the parent's locks."""
    while _locked_files:
        with contextlib.suppress(OSError):
            os.close(_locked_files.pop())


os.register_at_fork(after_in_child=_close_locked_files)


class _LocalWriter(FileWriter):
    """Writes a new file, or a file that another process has laid out.

    Args:
        durable: whether `close` syncs the file.
        reserved_bytes: number of bytes to reserve blocks for.
        size_bytes: the size that the file gets now; None: it grows with the writes.
        is_new: whether to create the file; otherwise it must exist.
        mode: permissions of a new file.
    """

    def __init__(
        self,
        path: Path,
        durable: bool,
        reserved_bytes: int = 0,
        *,
        size_bytes: int | None = None,
        is_new: bool = True,
        mode: int = 0o666,
    ) -> None:
        self._path = path
        self._durable = durable
        self._is_new = is_new
        self._file = os.open(path, (_MAKE if is_new else os.O_NOFOLLOW) | os.O_WRONLY | os.O_CLOEXEC, mode)
        try:
            with _named_errors(path):
                reserve(self._file, reserved_bytes)
                if size_bytes is not None:
                    os.ftruncate(self._file, size_bytes)
        except OSError:  # such as a full disk: no empty file must stay
            self.abort()
            raise

    def write_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        with _named_errors(self._path):
            stopped_at = _transfer(os.pwritev, self._file, offset_bytes, buffers)
        if stopped_at is not None:  # a write of 0 bytes is no error of the system call
            raise OSError(f"wrote nothing to {self._path} at {stopped_at}")

    def close(self) -> None:
        try:
            if self._durable:
                os.fsync(self._file)
        finally:
            # After an error, `abort` closes the descriptor again. Its number may belong to another file by then.
            file, self._file = self._file, -1
            os.close(file)

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # `close` may have closed the file already
            os.close(self._file)
        with contextlib.suppress(OSError):
            if self._is_new:  # otherwise other processes still write the file
                self._path.unlink()


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Add the path to OSErrors of calls that take only a file descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def _transfer(
    call: Callable[[int, list[memoryview], int], int], file: int, offset: int, buffers: Sequence[Buffer]
) -> int | None:
    """Read or write all buffers with ``call`` (preadv or pwritev), which may transfer only a part of its bytes.

    Returns:
        None, or the offset at which a call transferred no bytes: the end of the file.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    first = 0
    while first < len(views):
        batch = views[first : first + _MAX_BUFFERS]
        done = call(file, batch, offset)
        if done == 0 and any(len(view) for view in batch):  # for empty buffers, 0 bytes are correct
            return offset
        offset += done
        while first < len(views) and done >= len(views[first]):
            done -= len(views[first])
            first += 1
        if done:
            views[first] = views[first][done:]
    return None


class _LocalReader(FileReader):
    """Reads a file, which stays open, since opening it again costs a round trip on network disks.

    At most `_MAX_OPEN_FILES` files stay open, since a restart on few ranks may read thousands of files at once. Further
    files are opened for each read.

    Args:
        lasting: whether `close` does nothing. Such a reader is shared, and closes its file when it is
            garbage-collected.
    """

    _file = -1  # no descriptor; a class attribute, since `__del__` runs even if `__init__` raises

    def __init__(self, path: Path, *, lasting: bool) -> None:
        self.looks_in_place = True  # set to False when mapping fails
        self._path, self._lasting = path, lasting
        self._size = _size_of_file(path)
        if lasting:  # `LocalStorage.open_file` limits the number of these readers
            self._file = _open(path)
        elif _slots.acquire(blocking=False):  # else the file is opened for each read
            try:
                self._file = _open(path)
            except BaseException:  # Ctrl-C too must release the slot
                _slots.release()
                raise

    @property
    def size_bytes(self) -> int:
        return self._size

    def read_at(self, offset_bytes: int, buffers: Sequence[Buffer]) -> None:
        with nullcontext(self._file) if self._file >= 0 else _opened(self._path) as file:
            ended_at = _transfer(os.preadv, file, offset_bytes, buffers)
        if ended_at is not None:
            raise EOFError(f"{self._path} ends at byte {ended_at}")

    def view(self, start_bytes: int, stop_bytes: int) -> memoryview:
        pages = _mapped(self._path, start_bytes, stop_bytes)
        self.looks_in_place = pages is not None
        return super().view(start_bytes, stop_bytes) if pages is None else pages

    def is_at_hand(self, start_bytes: int, stop_bytes: int) -> bool:
        return is_cached(self._path, start_bytes, stop_bytes)

    def close(self) -> None:
        if not self._lasting:
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
            if not self._lasting:
                _slots.release()

    def __del__(self) -> None:
        self._close()  # for lasting readers, and readers that were never closed


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for reading; yields its descriptor."""
    file = _open(path)
    try:
        yield file
    finally:
        os.close(file)


def _size_of_file(path: Path) -> int:
    """Return the size of a regular file. Called before a file is opened, since opening a pipe waits for its writer.

    Raises:
        ValueError: if the path is not a regular file, or is a link to itself.
    """
    try:
        status = path.stat()
    except OSError as error:
        if error.errno != errno.ELOOP:  # reported like any other path that is not a regular file
            raise
        raise ValueError(f"{path} is a link that leads back to itself") from error
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")
        raise ValueError(f"{path} is {kind}")
    return status.st_size


def _mapped(path: Path, start: int, stop: int) -> memoryview | None:
    """Map bytes [start, stop) of a file until the view is garbage-collected; returns None if mapping fails.

    MADV_POPULATE_READ reads all pages now and reports errors; the caller then uses an ordinary read, which raises the
    error. Without this call, access to a page that cannot be read (a truncated file, a broken disk) would kill the
    process by SIGBUS.
    """
    if start >= stop or sys.platform != "linux":
        return None
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY  # mappings must be aligned
    with _opened(path) as file:
        try:
            # Writable, because torch warns about read-only arrays. Private, so that no write reaches the file.
            access = mmap.PROT_READ | mmap.PROT_WRITE
            pages = mmap.mmap(file, stop - first, flags=mmap.MAP_PRIVATE, prot=access, offset=first)
            pages.madvise(mmap.MADV_SEQUENTIAL)
            pages.madvise(_MADV_POPULATE_READ)
        except (OSError, ValueError):
            return None
    return memoryview(pages)[start - first :]


def _file_system_of(folder: Path) -> str:
    """Return the type of a folder's file system; "" if unknown."""
    try:
        mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    path = Path(os.path.realpath(folder))
    # The folder is on the mount with the longest path. Of several mounts at one path, the last one hides the rest.
    matches = [
        (len(point), number, kind)
        for number, (_, point, kind, *_) in enumerate(mounts)
        if path.is_relative_to(point)
    ]
    return max(matches, default=(0, 0, ""))[2]


class LocalStorage(Storage):
    """A folder of a file system.

    Args:
        root: the folder; the first write makes it. A relative path is resolved now, since the process may change its
            working directory during a save.
        durable: whether to sync files and folders; False for file systems in memory.
        neighbors: number of ranks that share this rank's cores, if torchrun's LOCAL_WORLD_SIZE is not set.
        private: whether only this user may access the folder, see `make_private`.
        whole_files: whether files are read and written from end to end, as conversions do: files stay open for reading,
            and blocks are reserved before a file is written.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        durable: bool = True,
        neighbors: int = 1,
        whole_files: bool = False,
        private: bool = False,
    ) -> None:
        self.root = Path(root).absolute()
        self.folders = MadeFolders(self.root, sync_names if durable else lambda _: None)
        self._private = self.root if private else None
        self._probe = FileSystemProbe()
        # Without `private`: `child` sets the private root itself.
        self._like_this = partial(LocalStorage, durable=durable, neighbors=neighbors, whole_files=whole_files)
        self._durable, self._whole_files = durable, whole_files
        self._open_files: dict[str, _LocalReader] = {}
        # This rank's share of the cores: cached bytes are copied by the CPU, so more threads would not be faster.
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        given = os.environ.get("LOCAL_WORLD_SIZE", "")  # some launchers leave the variable empty or 0
        sharing = int(given) if given.isdecimal() and int(given) else neighbors
        self.read_threads = max(1, min(4, cores // sharing))
        # At least two: while one thread waits for the disk, the other one copies or hashes.
        self.far_read_threads = self.write_threads = max(2, self.read_threads)

    @property
    def where(self) -> str:
        return str(self.root)

    @property
    def is_shared(self) -> bool:  # type: ignore[override]
        return _NETWORK_FILE_SYSTEM.fullmatch(_file_system_of(self.root)) is not None

    def child(self, name: str) -> LocalStorage:
        folder = self._like_this(self.root / name)
        # Every access inside a private root checks that root. Sharing the probe avoids probing each folder.
        folder._private, folder._probe = self._private, self._probe
        return folder

    def _at(self, name: str) -> Path:
        """Return the path of a file; in a private storage, first check that another user has not made the root."""
        if self._private is not None:
            make_private(self._private)
        return self.root / name

    @property
    def _mode(self) -> int:
        """Permissions of new files, before the umask is applied."""
        return 0o666 if self._private is None else 0o600

    def create(self, name: str, size_bytes: int) -> FileWriter:
        path, reserved_bytes = self._at(name), size_bytes if self._whole_files else 0
        return self.folders.using(
            path.parent, lambda: _LocalWriter(path, self._durable, reserved_bytes, mode=self._mode)
        )

    def lay_out(self, name: str, size_bytes: int) -> FileWriter:
        path = self._at(name)
        return self.folders.using(
            path.parent,
            lambda: _LocalWriter(path, self._durable, size_bytes, size_bytes=size_bytes, mode=self._mode),
        )

    def join(self, name: str) -> FileWriter:
        check_not_planted(path := self._at(name))
        return _LocalWriter(path, self._durable, is_new=False)

    def beside(self, name: str) -> LocalStorage:
        # The root may be a link. Next to its target, a rename stays on one file system.
        return self._like_this(Path(os.path.realpath(self.root)).with_name(name))

    def take_over(self, other: Storage, last: str = "") -> None:
        assert isinstance(other, LocalStorage)
        self._open_files.clear()  # their descriptors belong to files of the old folder
        move_over(other.root, Path(os.path.realpath(self.root)), last)
        other.remove("")

    def open_file(self, name: str) -> FileReader:
        path = self._at(name)
        if not self._whole_files:
            return _LocalReader(path, lasting=False)
        reader = self._open_files.get(name) or _LocalReader(path, lasting=True)
        if len(self._open_files) < _MAX_OPEN_FILES:  # otherwise the file is closed with the caller's reader
            self._open_files[name] = reader
        return reader

    def read_small(self, name: str, *, limit_bytes: int) -> bytes:
        path = self._at(name)
        _size_of_file(path)  # raises for a pipe, which `open` would wait for
        with open(path, "rb") as file:
            data = file.read(limit_bytes + 1)  # the extra byte shows that the file is too large
        if len(data) > limit_bytes:
            raise ValueError(f"{path} is larger than {limit_bytes} bytes")
        return data

    def commit(self, name: str, data: bytes, *, replace: bool) -> None:
        path = self._at(name)
        # Such as /dev/null, which a rename would replace.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise FileExistsError(errno.EEXIST, "this is a device or a pipe", str(path))
        self.folders.make(path.parent)
        known = self._probe.of(path.parent, durable=self._durable)
        if not known.renames:
            if replace:
                path.unlink(missing_ok=True)  # `_write_new` refuses existing files
            self._write_new(path, data)
            self.sync_folder("")
            return
        temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}{_TEMPORARY}")
        try:
            self._write_new(temporary, data)
            if replace:
                os.replace(temporary, path)
            elif known.links:
                os.link(temporary, path)  # fails if the file exists; a rename would replace it
            else:
                rename_unless_there(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        self.sync_folder("")

    def _write_new(self, path: Path, data: bytes) -> None:
        """Write a file durably, without following a link; raises FileExistsError if it exists."""
        with _named_errors(path):
            number = os.open(path, _MAKE | os.O_WRONLY | os.O_CLOEXEC, self._mode)
            with open(number, "wb") as file:
                file.write(data)
                file.flush()
                if self._durable:
                    os.fsync(number)

    def exists(self, name: str) -> bool:
        return self._at(name).exists()

    def check_not_planted(self) -> None:
        check_not_planted(self.root)

    def is_link(self, name: str) -> bool:
        return (self.root / name).is_symlink()

    def list_folder(self, name: str) -> list[str]:
        try:
            return sorted(entry.name for entry in self._at(name).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    @property
    def location(self) -> tuple[str, ...]:
        """Components of the path, after resolving symbolic links."""
        return ("file", *Path(os.path.realpath(self.root)).parts)

    def list_files(self) -> list[str]:
        # as_posix: names contain "/" on all systems.
        return sorted(p.relative_to(self.root).as_posix() for p in self.root.rglob("*") if p.is_file())

    def info(self, name: str) -> FileInfo | None:
        path = self.root / name
        if not path.is_file():
            return None
        status = path.stat()
        return FileInfo(status.st_size, f"{status.st_size} {status.st_mtime_ns}")

    def append(self, name: str, data: bytes) -> None:
        path = self._at(name)
        check_not_planted(path)

        def opened() -> int:
            return os.open(path, _APPEND, self._mode)

        with _named_errors(path), open(self.folders.using(path.parent, opened), "ab") as file:
            file.write(data)

    def rename(self, old: str, new: str) -> None:
        try:
            os.replace(self.root / old, self.root / new)
        except FileNotFoundError:  # another process may have renamed the file
            if not (self.root / new).is_file():
                raise

    def sync_folder(self, name: str) -> None:
        if not self._durable:
            return
        sync_names(self.root / name)
        if not name:
            # A killed attempt may have made the folder without syncing its name in the parent.
            sync_names(self.root.parent)

    def remove(self, name: str) -> None:
        path = self.root / name
        self._open_files.pop(name, None)  # a later reader must not get the removed file
        if any((self.root / parent).is_symlink() for parent in Path(name).parents if parent.name):
            return  # the file is in the target of a link, which must not change
        if path.is_dir() and not path.is_symlink():
            import shutil  # imports bz2 and lzma, which takes milliseconds of every start

            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()

    @property
    def free_bytes(self) -> int | None:
        # The root may not exist yet.
        existing = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        try:
            status = os.statvfs(existing)
        except OSError:  # the file system does not support it; a full disk will fail a write later
            return None
        # 0 blocks in total: the file system does not report sizes.
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    def remove_empty(self, name: str) -> None:
        with contextlib.suppress(OSError):  # not empty, or already removed
            (self.root / name).rmdir()

    def remove_abandoned(self, folders: Sequence[str], older_than_s: float) -> list[str]:
        names = [f"{folder}/{name}".lstrip("/") for folder in folders for name in self.list_folder(folder)]
        temporary = [name for name in names if _is_temporary(name.rpartition("/")[2])]
        old = [name for name in temporary if self.is_older(name, older_than_s)]
        for name in old:
            self.remove(name)
        return old

    def check_root(self) -> str | None:
        # lexists: a dangling link is a problem, too.
        existing = next(folder for folder in (self.root, *self.root.parents) if os.path.lexists(folder))
        # By default os.access checks the real user, but files are written as the effective user.
        ids = {"effective_ids": True} if os.access in os.supports_effective_ids else {}
        problem, cure = None, ALLOW_WRITES
        if not os.path.isdir(existing):
            problem, cure = f"{existing}, which is not a folder", "remove or rename it"
        elif existing == self.root and not os.access(existing, os.R_OK | os.X_OK, **ids):
            problem = f"{existing}, which user {os.geteuid()} may not read"
        elif not os.access(existing, os.W_OK | os.X_OK, **ids):
            problem = f"{existing}, which user {os.geteuid()} may not write to"
            if existing == self.root and any(existing.iterdir()):
                return problem
        if problem is not None:
            raise bad_root(self.where, problem, cure)
        return None

    def is_older(self, name: str, seconds: float) -> bool:
        path = self._at(name)
        try:
            # lstat: the age of a link, not of its target.
            newest_s = max(at.lstat().st_mtime for at in (path, *path.rglob("*")))
        except FileNotFoundError:  # another process is changing the folder now
            return False
        return time.time() - newest_s > seconds or seconds <= 0  # 0 includes files with times in the future

    @contextmanager
    def lock(self) -> Iterator[None]:
        owner, path = os.getpid(), self._at(_LOCK_NAME)
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        file = self.folders.using(self.root, lambda: os.open(path, flags, self._mode))
        _locked_files.add(file)

        def close() -> None:
            if os.getpid() != owner:
                return  # in a forked child, `_close_locked_files` has closed the file
            _locked_files.discard(file)
            # Closing is not enough: a child that was forked under the lock may still have a copy of the descriptor.
            try:
                fcntl.flock(file, fcntl.LOCK_UN)
            except OSError as error:
                if error.errno not in _NO_FLOCK:  # without flock, `held_by_file` has locked the folder
                    raise
            finally:
                os.close(file)

        with contextlib.ExitStack() as held:
            held.callback(close)
            has_flock = True
            try:
                # The kernel releases the lock when its owner dies.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    raise
                has_flock = False
            if not has_flock:
                held.enter_context(held_by_file(self.root))
            # The previous owner may have renamed the folder. The locked file is then no longer at this path.
            if not (path.exists() and os.path.samestat(os.fstat(file), path.stat())):
                raise BlockingIOError(
                    errno.EWOULDBLOCK, "the process that held the lock has renamed the folder"
                )
            self._probe.of(self.root, durable=self._durable, flock=has_flock)
            yield


def _is_temporary(name: str) -> bool:
    """Return whether a file is temporary. If such a file is old, a killed process has left it."""
    is_draft = name.startswith(f"{LOCK_FILE_NAME}.")
    return is_draft or is_probe(name) or (name.startswith(".") and name.endswith(_TEMPORARY))


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, or check that an existing folder is one.

    Raises:
        StorageError: if the folder is a link, belongs to another user, or other users may enter or replace it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # checked below
        folder.mkdir(0o700)
    status, parent = folder.lstat(), folder.parent.stat()  # lstat: a link is a problem, whatever its target
    problem = None
    if not stat.S_ISDIR(status.st_mode):
        problem = "a link" if stat.S_ISLNK(status.st_mode) else "not a folder"
    elif status.st_uid != os.geteuid():
        problem = f"a folder of user {status.st_uid}"
    elif status.st_mode & 0o077:
        problem = f"a folder with mode {stat.S_IMODE(status.st_mode):04o}"
    elif parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        problem = f"a folder in {folder.parent}, where every user may replace it (no sticky bit)"
    if problem is not None:
        raise StorageError(
            "A private folder cannot be trusted.",
            expected=f"a folder of user {os.geteuid()} with mode 0700",
            got=problem,
            where=str(folder),
            todo="remove it if it is yours; else pass another name or folder",
        )


def check_not_planted(path: Path) -> None:
    """Check that another user has not created a file or folder that this job is about to write to.

    Raises:
        CheckpointError: if the path is a link, or belongs to another user in a folder that all users can write to.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    parent = path.parent.stat()
    # The folder's owner is trusted, because the owner may replace files in it anyway.
    is_foreign = parent.st_mode & stat.S_IWOTH and status.st_uid not in (os.geteuid(), parent.st_uid)
    if stat.S_ISLNK(status.st_mode) or is_foreign:
        raise CheckpointError(
            "A file or folder for temporary use already exists, and another user may have created it.",
            expected=f"a file or folder of user {os.geteuid()}, or none",
            got="a link" if stat.S_ISLNK(status.st_mode) else f"a file or folder of user {status.st_uid}",
            where=str(path),
            todo="remove it, or write to a folder that only you can write to",
        )
