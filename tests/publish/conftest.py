"""A finished run of a pico model, and a hub on loopback for the real client to talk to.

The hub is the least of the API that `huggingface_hub` pushes to and loads from: repositories,
branches, large files by content, commits; one token. It can be made to cut an upload, or to hold
one until the client is gone.
"""

import base64
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
import yaml
from huggingface_hub import close_session, constants

from bilinearize.cli import main

TOKEN = "hf_right" + "x" * 20
LARGE = 5000
"""Files of so many bytes and more go up as large files."""


class Hub(ThreadingHTTPServer):
    """A hub on a free port of the loopback interface."""

    daemon_threads = True
    token = TOKEN

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str] = set()
        self.drop_upload: int | None = None
        self.hold_upload: int | None = None
        self.holding = threading.Event()
        self.readonly = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def make(self, repo: str, private: bool = False) -> dict:
        """A new repository, with the file that the hub puts into each."""
        branches = {"main": [self.commit_of({".gitattributes": b"*.safetensors filter=lfs\n"})]}
        self.repos[repo] = {"private": private, "branches": branches}
        return self.repos[repo]

    @staticmethod
    def commit_of(files: dict[str, bytes], message: str = "initial commit") -> dict:
        digest = hashlib.sha1(repr((sorted(files.items()), message, time.time())).encode())
        return {"id": digest.hexdigest(), "files": files, "message": message}

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """What a branch holds."""
        return self.repos[repo]["branches"][branch][-1]["files"]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args) -> None:
        pass

    def reply(self, status: int, content: dict | list | bytes = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, message: str, code: str | None = None) -> None:
        headers = {"X_Error_Message": message} | ({"X_Error_Code": code} if code else {})
        self.reply(status, {"error": message}, **headers)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_any(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.server.requests.append((self.command, path))
        if path.startswith("/storage/"):
            self.put_object(path.removeprefix("/storage/"))
            return
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        content = self.body()
        if given:
            self.server.tokens.add(given)
        writing = self.command == "POST" or path == "/api/whoami-v2"
        if writing and given != TOKEN:
            self.refuse(401, "Invalid credentials in Authorization header")
            return
        for pattern, action in ROUTES:
            if found := re.fullmatch(pattern, path):
                action(self, content, *found.groups())
                return
        self.refuse(404, f"no such address: {path}")

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def find(self, repo: str, branch: str = "main") -> dict | None:
        found = self.server.repos.get(repo)
        own = found is not None and f"Bearer {TOKEN}" == self.headers.get("Authorization")
        if found is None or (found["private"] and not own):
            self.refuse(404, "Repository not found", "RepoNotFound")
            return None
        for commits in found["branches"].values():
            for commit in commits:
                if commit["id"] == branch:
                    return commit
        if branch not in found["branches"]:
            self.refuse(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            return None
        return found["branches"][branch][-1]

    def whoami(self, content: bytes) -> None:
        self.reply(200, {"type": "user", "name": "me", "orgs": [], "auth": {}})

    def create(self, content: bytes) -> None:
        wanted = json.loads(content)
        repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if self.server.readonly:
            self.refuse(403, "You don't have the rights to create a model under this namespace")
        elif repo in self.server.repos:
            self.refuse(409, "You already created this model repo")
        else:
            private = wanted.get("private") or wanted.get("visibility") == "private"
            self.server.make(repo, bool(private))
            self.reply(200, {"url": f"{self.server.endpoint}/{repo}", "name": repo})

    def info(self, content: bytes, repo: str, branch: str | None = None) -> None:
        commit = self.find(repo, branch or "main")
        if commit is not None:
            siblings = [{"rfilename": name} for name in commit["files"]]
            private = self.server.repos[repo]["private"]
            facts = {"id": repo, "modelId": repo, "private": private, "tags": [], "downloads": 0}
            self.reply(200, facts | {"sha": commit["id"], "siblings": siblings, "likes": 0})

    def tree(self, content: bytes, repo: str, branch: str) -> None:
        commit = self.find(repo, branch)
        if commit is not None:
            files = commit["files"].items()
            self.reply(
                200,
                [
                    {"type": "file", "path": name, "size": len(data), "oid": blob_id(data)}
                    for name, data in files
                ],
            )

    def branch(self, content: bytes, repo: str, name: str) -> None:
        found = self.server.repos[repo]["branches"]
        if name in found:
            self.refuse(409, "Reference already exists")
        else:
            found[name] = found["main"][-1:]
            self.reply(201, {})

    def validate(self, content: bytes) -> None:
        text = json.loads(content)["content"]
        if text.startswith("---\n"):
            self.reply(200, {"errors": [], "warnings": []})
        else:
            self.reply(400, {"errors": [{"message": "no metadata"}], "warnings": []})

    def preupload(self, content: bytes, repo: str, branch: str) -> None:
        if self.find(repo, branch) is None:
            return
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(content)["files"]
        ]
        self.reply(200, {"files": files})

    def batch(self, content: bytes, repo: str) -> None:
        objects = []
        for wanted in json.loads(content)["objects"]:
            known = wanted["oid"] in self.server.objects
            href = f"{self.server.endpoint}/storage/{wanted['oid']}"
            objects.append(wanted if known else wanted | {"actions": {"upload": {"href": href}}})
        self.reply(200, {"transfer": "basic", "objects": objects})

    def put_object(self, oid: str) -> None:
        self.server.uploads.append(oid)
        number = len(self.server.uploads)
        if number == self.server.hold_upload:
            self.server.holding.set()
            while self.rfile.read(1):  # until the client is gone
                pass
            return
        if self.server.drop_upload is not None and number >= self.server.drop_upload:
            self.close_connection = True
            self.connection.close()
            return
        data = self.body()
        if hashlib.sha256(data).hexdigest() != oid:
            self.refuse(400, "content and oid differ")
            return
        self.server.objects[oid] = data
        self.reply(200)

    def commit(self, content: bytes, repo: str, branch: str) -> None:
        before = self.find(repo, branch)
        if before is None:
            return
        files, message = dict(before["files"]), ""
        for line in content.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.server.commit_of(files, message)
        self.server.repos[repo]["branches"][branch].append(commit)
        url = f"{self.server.endpoint}/{repo}/commit/{commit['id']}"
        self.reply(200, {"success": True, "commitUrl": url, "commitOid": commit["id"]})

    def resolve(self, content: bytes, repo: str, branch: str, name: str) -> None:
        commit = self.find(repo, branch)
        if commit is None:
            return
        if name not in commit["files"]:
            self.refuse(404, "Entry not found", "EntryNotFound")
            return
        data = commit["files"][name]
        headers = {"ETag": f'"{blob_id(data)}"', "X_Repo_Commit": commit["id"]}
        self.reply(200, data, **headers)


def blob_id(data: bytes) -> str:
    """The id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


REPO, REV = "([^/]+/[^/]+)", "([^/]+)"
ROUTES = [
    ("/api/whoami-v2", Handler.whoami),
    ("/api/repos/create", Handler.create),
    ("/api/validate-yaml", Handler.validate),
    (f"/api/models/{REPO}", Handler.info),
    (f"/api/models/{REPO}/revision/{REV}", Handler.info),
    (f"/api/models/{REPO}/tree/{REV}/?", Handler.tree),
    (f"/api/models/{REPO}/branch/{REV}", Handler.branch),
    (f"/api/models/{REPO}/preupload/{REV}", Handler.preupload),
    (f"/api/models/{REPO}/commit/{REV}", Handler.commit),
    (f"/{REPO}.git/info/lfs/objects/batch", Handler.batch),
    (f"/{REPO}/resolve/{REV}/(.+)", Handler.resolve),
]


@pytest.fixture
def hub(monkeypatch):
    """A running hub, to which this process's client talks with the right token."""
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    close_session()
    yield server
    close_session()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def finished(pico_llama, text_file, documents_file, tmp_path_factory) -> Path:
    """The folder of a whole run; its source's card names a licence."""
    folder = tmp_path_factory.mktemp("publish")
    source = folder / "pico-llama"
    source.mkdir()
    for file in pico_llama.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "README.md").write_text("---\nlicense: mit\ntags: [a]\n---\n# Pico\n")
    config = {
        "source": str(source),
        "out": str(folder / "run"),
        "baselines": ["taylor"],
        "convert": {"text": str(text_file), "tokens": 1024, "window": 32},
        "finetune": {"text": str(text_file), "tokens": 1024, "window": 32},
        "eval": {
            "text": {"words": str(documents_file), "more": str(text_file)},
            **{"tokens": 512, "window": 32, "prompts": 2, "sample_tokens": 4},
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    main(["run", str(folder / "run.yaml")])
    return folder / "run"
