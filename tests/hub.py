"""A Hugging Face hub in memory, on loopback, for the real client: repositories with branches and
commits. Private repositories require the token."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass
class Repository:
    private: bool = False
    gated: bool = False
    branches: dict[str, list[str]] = field(default_factory=lambda: {"main": []})
    """Commits by branch, the newest last."""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by commit."""

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = f"{len(self.files):040x}"
        self.files[sha] = files
        self.branches[branch].append(sha)
        return sha

    def at(self, revision: str) -> str | None:
        if revision in self.files:
            return revision
        return (self.branches.get(revision) or [None])[-1]


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    cut_after: int = 0
    num_cuts: int = 0
    """Remaining downloads that break off after `cut_after` bytes."""
    url: str = ""

    def put(
        self, name: str, files: dict[str, bytes], *, branch: str = "main", **changes: Any
    ) -> str:
        repository = self.repositories.setdefault(name, Repository(**changes))
        repository.branches.setdefault(branch, [])
        return repository.commit(branch, files)


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class RefusedError(Exception):
    def __init__(self, status: int, code: str = ""):
        super().__init__(status)
        self.status, self.headers = status, {"X-Error-Code": code}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_GET

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            for pattern, method in _ROUTES.items():
                if found := re.fullmatch(pattern, f"{self.command} {path}"):
                    method(self, *found.groups())
                    return
            raise RefusedError(404)
        except RefusedError as refused:
            self._send(refused.status, b"", refused.headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.num_cuts and len(body) > self.hub.cut_after and status in (200, 206):
            self.hub.num_cuts -= 1
            self.close_connection = True
            body = body[: self.hub.cut_after]
        self.wfile.write(body)

    def _json(self, tree: Any, status: int = 200) -> None:
        self._send(status, json.dumps(tree).encode(), {"Content-Type": "application/json"})

    def _is_known(self) -> bool:
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {TOKEN}"):
            raise RefusedError(401)
        return given is not None

    def _repository(self, name: str) -> Repository:
        is_known, found = self._is_known(), self.hub.repositories.get(name)
        if found is None or (found.private and not is_known):
            raise RefusedError(404 if is_known else 401, "RepoNotFound")
        return found

    def _commit(self, name: str, revision: str) -> tuple[Repository, str]:
        repository = self._repository(name)
        found = repository.at(revision)
        if found is None:
            raise RefusedError(404, "RevisionNotFound")
        return repository, found

    def whoami(self) -> None:
        if not self._is_known():
            raise RefusedError(401)
        self._json({"type": "user", "name": "user"})

    def info(self, name: str, revision: str | None) -> None:
        repository = self._repository(name)
        sha = self._commit(name, revision)[1] if revision else repository.at("main")
        self._json({"id": name, "sha": sha, "private": repository.private, "siblings": []})

    def tree(self, name: str, revision: str) -> None:
        repository = self._repository(name)
        is_empty = repository.branches.get(revision) == []
        files = {} if is_empty else repository.files[self._commit(name, revision)[1]]
        self._json([_entry(path, content) for path, content in sorted(files.items())])

    def paths_info(self, name: str, revision: str) -> None:
        repository, sha = self._commit(name, revision)
        is_json = self.body.startswith(b"{")
        asked = (json.loads if is_json else parse_qs)(self.body.decode())["paths"]
        files = repository.files[sha]
        self._json([_entry(path, files[path]) for path in asked if path in files])

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository, sha = self._commit(name, revision)
        if repository.gated:
            raise RefusedError(403, "GatedRepo")
        content = repository.files[sha].get(path)
        if content is None:
            raise RefusedError(404, "EntryNotFound")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if ranged := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, last = int(ranged[1]), int(ranged[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
            self._send(206, content[start : last + 1], headers)
        else:
            self._send(200, content, headers)

    def create(self) -> None:
        if not self._is_known():
            raise RefusedError(401)
        given = json.loads(self.body)
        name = "/".join(filter(None, (given["organization"], given["name"])))
        is_private = given.get("visibility") == "private" or given.get("private") is True
        status = 409 if name in self.hub.repositories else 200
        self.hub.repositories.setdefault(name, Repository(private=is_private))
        self._json({"url": f"{self.hub.url}/{name}", "name": name}, status)

    def branch(self, name: str, branch: str) -> None:
        branches = self._repository(name).branches
        if branch in branches:
            raise RefusedError(409)
        branches[branch] = list(branches["main"])
        self._json({})

    def preupload(self, name: str, _revision: str) -> None:
        self._repository(name)
        files = json.loads(self.body)["files"]
        for each in files:
            each.update(uploadMode="regular", shouldIgnore=False, oid=None)
        self._json({"files": files})

    def commit(self, name: str, branch: str) -> None:
        repository = self._repository(name)
        if branch not in repository.branches:
            raise RefusedError(404, "RevisionNotFound")
        files = dict(repository.files.get(repository.at(branch) or "", {}))
        for line in self.body.splitlines():
            order = json.loads(line)
            match order["key"], order["value"]:
                case "file", value:
                    files[value["path"]] = base64.b64decode(value["content"])
                case "deletedFile", value:
                    del files[value["path"]]
        sha = repository.commit(branch, files)
        self._json(
            {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha, "hookOutput": ""}
        )

    def approve(self) -> None:
        self._json({"warnings": [], "errors": []})


def _entry(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": blob}


_NAME = r"([^/]+/[^/]+?)"
_ROUTES = {
    r"GET /api/whoami-v2": _Handler.whoami,
    rf"GET /api/(?:models|datasets)/{_NAME}(?:/revision/(.+))?": _Handler.info,
    rf"GET /api/(?:models|datasets)/{_NAME}/tree/(.+)": _Handler.tree,
    rf"POST /api/datasets/{_NAME}/paths-info/(.+)": _Handler.paths_info,
    rf"(?:GET|HEAD) /(?:datasets/)?{_NAME}/resolve/([^/]+)/(.+)": _Handler.resolve,
    r"POST /api/repos/create": _Handler.create,
    rf"POST /api/models/{_NAME}/branch/(.+)": _Handler.branch,
    rf"POST /api/models/{_NAME}/preupload/(.+)": _Handler.preupload,
    rf"POST /api/models/{_NAME}/commit/(.+)": _Handler.commit,
    r"POST /api/validate-yaml": _Handler.approve,
}
