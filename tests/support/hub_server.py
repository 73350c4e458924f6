"""A small Hugging Face Hub on loopback: repositories of models in memory, for huggingface_hub's own client.

It answers what the client asks: information about a repository, its tree, files with ranges, and commits. Large files
are sent as Git LFS objects, as a Hub without Xet takes them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """The state of the server.

    Attributes:
        repositories: id -> revision -> path -> bytes.
        private: id -> the token that reads it.
        requests: method, path and range of every request, in order.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, str] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self._objects: dict[str, bytes] = {}  # uploaded, by sha256, until a commit names them
        self.url = ""

    def add(self, repository: str, files: dict[str, bytes], revision: str = "main") -> None:
        """Put files into a revision of a repository."""
        self.repositories.setdefault(repository, {}).setdefault(revision, {}).update(files)

    def info(self, repository: str, revision: str) -> dict[str, Any]:
        """What the API says about a repository."""
        files = self.repositories[repository][revision]
        return {
            "id": repository,
            "modelId": repository,
            "sha": _commit_of(repository, revision),
            "private": repository in self.private,
            "tags": [],
            "siblings": [{"rfilename": name} for name in sorted(files)],
            "lastModified": "2026-11-29T00:00:00.000Z",
        }


def _commit_of(repository: str, revision: str) -> str:
    return (
        revision
        if re.fullmatch("[0-9a-f]{40}", revision)
        else hashlib.sha1(f"{repository} {revision}".encode()).hexdigest()
    )


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.pop("length", str(len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), Content_Type="application/json")

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, json.dumps({"error": code}).encode(), X_Error_Code=code, X_Error_Message=code)

    def _revision(self, repository: str, revision: str) -> str | None:
        """The revision's name here, of its name or its commit; None after an answer that refuses it."""
        known = self.hub.repositories.get(repository)
        token = self.hub.private.get(repository)
        if known is None or (token and self.headers.get("Authorization") != f"Bearer {token}"):
            self._refuse(401 if token else 404, "RepoNotFound")
            return None
        for name in known:
            if revision in (name, _commit_of(repository, name)):
                return name
        self._refuse(404, "RevisionNotFound")
        return None

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            name = self._revision(found[1], found[2] or "main")
            if name is not None:
                self._json(hub.info(found[1], name))
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?(.*)", path):
            name = self._revision(found[1], found[2])
            if name is not None:
                self._json(
                    self._tree(
                        hub.repositories[found[1]][name], found[3], "recursive=true" in self.path.lower()
                    )
                )
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            name = self._revision(found[1], found[2])
            if name is None:
                return
            data = hub.repositories[found[1]][name].get(found[3])
            if data is None:
                self._refuse(404, "EntryNotFound")
                return
            tag = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X_Repo_Commit": _commit_of(found[1], name),
            }
            if (part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")) is not None:
                first, last = int(part[1]), min(int(part[2] or len(data) - 1), len(data) - 1)
                span = f"bytes {first}-{last}/{len(data)}"
                self._send(206, data[first : last + 1], Content_Range=span, Accept_Ranges="bytes", **tag)
            else:
                self._send(200, data, Accept_Ranges="bytes", **tag)
        else:
            self._send(404)

    @staticmethod
    def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for name, data in files.items():
            if not name.startswith(prefix):
                continue
            first, _, rest = name.removeprefix(prefix).partition("/")
            oid = hashlib.sha1(data).hexdigest()
            if rest:
                entries[prefix + first] = {"type": "directory", "path": prefix + first, "oid": oid, "size": 0}
            if recursive or not rest:
                entries[name] = {"type": "file", "path": name, "oid": oid, "size": len(data)}
        return list(entries.values())

    def do_POST(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(("POST", path, None))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = (
                f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
            )
            is_there = name in hub.repositories
            hub.repositories.setdefault(name, {"main": {}})
            self._json({"url": f"{hub.url}/{name}", "id": name}, 409 if is_there else 200)
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                }
                for each in json.loads(body)["files"]
            ]
            self._json({"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]})
        elif re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/upload/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            files = hub.repositories[found[1]].setdefault(found[2], {})
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub._objects.pop(value["oid"])
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            commit = _commit_of(found[1], found[2])
            self._json(
                {"commitUrl": f"{hub.url}/{found[1]}/commit/{commit}", "commitOid": commit, "success": True}
            )
        else:
            self._send(404)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub._objects[self.path.rpartition("/")[2]] = data
        self._send(200)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Context manager: a Hub at ``hub.url``, for ``HF_ENDPOINT``."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
