"""A small Hub on the loopback interface, as far as huggingface_hub needs one to push and pull models.

Written from the client's side of the protocol (huggingface_hub 1 and 2, git-lfs batch API). Large files go through
LFS; anything that no route answers is kept in `unknown`, so that a test can see that nothing was made up.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard

TOKEN = "hf_loopback"
USER = "me"


class LoopbackHub:
    """The server and what it stores. Use it as a context manager.

    Attributes:
        url: its address, for `HF_ENDPOINT`.
        repos: repository -> {revision or commit: {path: bytes}}.
        stored: sha256 -> content of LFS objects.
        uploads: sha256 of each LFS object in the order in which it came in.
        hold_after: how many LFS uploads get through before the others are held, as by a broken line; None: all.
        held: set once an upload is held.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.heads: dict[str, dict[str, str]] = {}
        self.stored: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.unknown: list[str] = []
        self.hold_after: int | None = None
        self.held, self.release, self.lock = threading.Event(), threading.Event(), threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "LoopbackHub":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def create(self, repo: str, files: dict[str, bytes] | None = None) -> None:
        self.repos[repo] = {}
        self.heads[repo] = {}
        self.commit(repo, "main", files or {".gitattributes": b"*.safetensors filter=lfs\n"})

    def commit(self, repo: str, revision: str, files: dict[str, bytes]) -> str:
        digest = hashlib.sha1(f"{repo} {len(self.repos[repo])}".encode())
        for path in sorted(files):
            digest.update(path.encode() + hashlib.sha256(files[path]).digest())
        self.repos[repo][digest.hexdigest()] = files
        self.heads[repo][revision] = digest.hexdigest()
        return digest.hexdigest()

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes] | None:
        """The files of a repository at a branch or commit; None if there is no such thing."""
        commits = self.repos.get(repo, {})
        return commits.get(self.heads.get(repo, {}).get(revision, revision))


def _is_large(path: str, size: int) -> bool:
    return path.endswith((".safetensors", ".png")) or size > 10 * 2**20


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ThreadingHTTPServer

    ROUTES = [
        ("GET", r"/api/whoami-v2", "whoami"),
        ("GET", r"/api/agent-harnesses", "telemetry"),
        ("POST", r"/api/repos/create", "create_repo"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("GET", r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", "model_info"),
        ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", "tree"),
        ("POST", r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", "branch"),
        ("POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", "preupload"),
        ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", "commit"),
        ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/lfs/([0-9a-f]{64})", "lfs_upload"),
        ("POST", r"/lfs/verify", "lfs_verify"),
        ("HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
        ("GET", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
    ]

    @property
    def hub(self) -> LoopbackHub:
        return self.server.hub

    def _dispatch(self) -> None:
        path = urlsplit(self.path).path
        self.body = self._read_body()
        for method, pattern, name in self.ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method == self.command:
                return getattr(self, name)(*(g and unquote(g) for g in match.groups()))
        self.hub.unknown.append(f"{self.command} {path}")
        return self._error(404, "no such route")

    do_GET = do_HEAD = do_POST = do_PUT = _dispatch

    def log_message(self, *args) -> None:
        pass

    def _read_body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().strip(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value, status: int = 200) -> None:
        self._answer(json.dumps(value).encode(), status, Content_Type="application/json")

    def _error(self, status: int, message: str, code: str | None = None) -> None:
        headers = {"X_Error_Message": message, **({"X_Error_Code": code} if code else {})}
        self._answer(json.dumps({"error": message}).encode(), status, Content_Type="application/json", **headers)

    def _authorised(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._error(401, "Invalid credentials in Authorization header")
        return False

    def _files(self, repo: str, revision: str | None) -> dict[str, bytes] | None:
        if repo not in self.hub.repos:
            self._error(404, "Repository not found", "RepoNotFound")
            return None
        files = self.hub.files(repo, revision or "main")
        if files is None:
            self._error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return files

    def _sha(self, repo: str, revision: str | None) -> str:
        return self.hub.heads[repo].get(revision or "main", revision or "main")

    def whoami(self) -> None:
        if self._authorised():
            self._json({"type": "user", "name": USER, "orgs": []})

    def telemetry(self) -> None:
        self._json({})

    def create_repo(self) -> None:
        if not self._authorised():
            return
        asked = json.loads(self.body)
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        if repo in self.hub.repos:
            return self._json({"error": "You already created this model repo", "url": f"{self.hub.url}/{repo}"}, 409)
        self.hub.create(repo)
        self._json({"url": f"{self.hub.url}/{repo}", "name": repo})

    def validate_yaml(self) -> None:
        self._json({"errors": [], "warnings": []})

    def model_info(self, repo: str, revision: str | None) -> None:
        files = self._files(repo, revision)
        if files is not None:
            card = ModelCard(files.get("README.md", b"").decode()).data.to_dict() if "README.md" in files else {}
            siblings = [{"rfilename": path} for path in files]
            info = {"id": repo, "modelId": repo, "sha": self._sha(repo, revision), "siblings": siblings}
            self._json({**info, "private": False, "tags": card.get("tags", []), "cardData": card})

    def tree(self, repo: str, revision: str, folder: str | None) -> None:
        files = self._files(repo, revision)
        if files is None:
            return
        found = [path for path in files if folder is None or path.startswith(f"{folder}/")]
        if folder is not None and not found:
            return self._error(404, f"{folder} does not exist", "EntryNotFound")
        self._json([{"type": "file", "path": p, "size": len(files[p]), "oid": _git_oid(files[p])} for p in found])

    def branch(self, repo: str, branch: str) -> None:
        if self._authorised() and self._files(repo, None) is not None:
            if branch in self.hub.heads[repo]:
                return self._error(409, "Reference already exists")
            self.hub.heads[repo][branch] = self.hub.heads[repo]["main"]
            self._json({})

    def preupload(self, repo: str, revision: str) -> None:
        if not self._authorised() or (files := self._files(repo, revision)) is None:
            return
        answers = []
        for asked in json.loads(self.body)["files"]:
            large, known = _is_large(asked["path"], asked["size"]), files.get(asked["path"])
            oid = None if known is None else hashlib.sha256(known).hexdigest() if large else _git_oid(known)
            mode = "lfs" if large else "regular"
            answers.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": answers})

    def lfs_batch(self, repo: str) -> None:
        if not self._authorised() or self._files(repo, None) is None:
            return
        objects = []
        for asked in json.loads(self.body)["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.stored:
                upload = {"href": f"{self.hub.url}/lfs/{asked['oid']}", "header": {}}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/lfs/verify"}}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid: str) -> None:
        with self.hub.lock:
            if self.hub.hold_after is not None and len(self.hub.uploads) >= self.hub.hold_after:
                self.hub.held.set()
                self.hub.release.wait(60)
                self.close_connection = True
                return
            if hashlib.sha256(self.body).hexdigest() != oid:
                return self._error(400, "The content is not what its name says")
            self.hub.stored[oid] = self.body
            self.hub.uploads.append(oid)
        self._answer(b"")

    def lfs_verify(self) -> None:
        asked = json.loads(self.body)
        known = len(self.hub.stored.get(asked["oid"], b"")) == asked["size"]
        self._json({}) if known else self._error(404, "Object does not exist")

    def commit(self, repo: str, revision: str) -> None:
        if not self._authorised() or (files := self._files(repo, revision)) is None:
            return
        files = dict(files)
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    return self._error(400, f"LFS object {value['oid']} was not uploaded")
                files[value["path"]] = self.hub.stored[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.hub.commit(repo, revision, files)
        self._json({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})

    def resolve(self, repo: str, revision: str, path: str) -> None:
        files = self._files(repo, revision)
        if files is None:
            return
        if path not in files:
            return self._error(404, "Entry not found", "EntryNotFound")
        content = files[path]
        headers = {"ETag": f'"{_git_oid(content)}"', "X_Repo_Commit": self._sha(repo, revision)}
        if _is_large(path, len(content)):
            oid = hashlib.sha256(content).hexdigest()
            headers |= {"X_Linked_Etag": f'"{oid}"', "X_Linked_Size": str(len(content))}
        status, asked = 200, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            start, stop = int(asked[1]), int(asked[2] or len(content) - 1) + 1
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            status, content = 206, content[start:stop]
        self._answer(content, status, **headers)


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
