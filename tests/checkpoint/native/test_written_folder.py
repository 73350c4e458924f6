"""A folder that ranks write together, and its marker while it is incomplete."""

from __future__ import annotations

from vescale_fsdp.checkpoint.native.written_folder import WrittenFolder
from vescale_fsdp.checkpoint.storage.remote import RemoteStorage


class _Watched(RemoteStorage):
    """Lists what is removed, and whether the deciding file exists then."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.removals: list[tuple[str, bool]] = []

    def remove(self, name: str) -> None:
        self.removals.append((name, self.exists("last")))
        super().remove(name)


def test_in_an_object_store_the_marker_goes_after_the_deciding_file_is_there() -> None:
    """A process killed between the two leaves a folder with a marker, which readers refuse and a save replaces."""
    storage = _Watched("memory://marked/c")
    folder = WrittenFolder(storage, "a test", "last", lambda _: True, "marker")
    folder.begin()
    storage.removals.clear()
    folder.commit({"last": lambda: [b"x"]}, [])

    assert storage.removals == [("marker", True)]
    assert storage.list_files() == ["last"]
