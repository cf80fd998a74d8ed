"""`bilinearize push`: a checkpoint to the hub, verified first, resumable, in one commit.

Weights are uploaded by content before the commit that names them, so an interrupted push leaves the
repository as it was, and the next one goes on with the files that are not there yet.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  (httpx's, or its successor's)
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from bilinearize.model.errors import InputError
from bilinearize.publish.card import choose_license, format_card
from bilinearize.publish.plan import Plan, find_checkpoint, plan_upload

KEPT = (".gitattributes",)


def push(
    folder: Path,
    repo: str,
    *,
    report: str | None = None,
    private: bool = False,
    revision: str | None = None,
    update: bool = False,
    license: str | None = None,  # noqa: A002  (the flag's name)
    message: str = "Upload with bilinearize",
    dry_run: bool = False,
) -> Plan:
    """Verify `folder`, write its card, and upload both; or list what would go up.

    Args:
        folder: a converted or finetuned checkpoint, or the folder of a finished run.
        repo: `owner/name` on the hub that `HF_ENDPOINT` names, by default huggingface.co.

    The others are the fields of `bilinearize.publish.config.PushConfig`. The token is the one of
    `hf auth login` or `HF_TOKEN`; it is never written or printed.

    Raises:
        InputError: if the checkpoint isn't whole, the repository holds other files, or the hub
            can't be reached or refuses. The repository is as it was then.
    """
    check_repo(repo)
    folder, own_report = find_checkpoint(Path(folder))
    plan = plan_upload(folder, Path(report) if report is not None else own_report)
    card = format_card(plan, repo, choose_license(plan, license))
    plan.files["README.md"] = card.encode()
    for name in plan.left_out:
        print(f"left out: {name}")
    if dry_run:
        print("\n".join([*plan.lines(), f"{len(plan.files)} files would go to {repo}"]))
        return plan
    token = find_token()
    api = HfApi(token=token)
    with one_line(api, repo, token):
        stale = prepare_repo(api, repo, private, revision, update, plan)
        url = upload(api, repo, revision, message, plan, stale)
    print(f"{len(plan.files)} files are at {url}")
    return plan


def check_push(repo: str) -> None:
    """Check before a long run that its end can be pushed: the name, and that there is a token.

    Raises:
        InputError: if not.
    """
    check_repo(repo)
    find_token()


def check_repo(repo: str) -> None:
    """Raise InputError unless `repo` reads `owner/name`."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f"{repo!r} is no repository id: {_first_line(error)}") from error
    if repo.count("/") != 1:
        raise InputError(f"{repo!r} is no repository id; write it as owner/name.")


def find_token() -> str:
    """The token of the hub's own login.

    Raises:
        InputError: if there is none.
    """
    token = get_token()
    if not token:
        raise InputError("no Hugging Face token; run `hf auth login`, or set HF_TOKEN.")
    return token


def prepare_repo(
    api: HfApi, repo: str, private: bool, revision: str | None, update: bool, plan: Plan
) -> list[str]:
    """Make the repository and branch where they are missing; what an update removes.

    Raises:
        InputError: if the repository holds files already and `update` is not set.
    """
    api.whoami()
    created, present = False, []
    try:
        present = api.list_repo_files(repo, revision=revision)
    except RevisionNotFoundError:
        created = True
    except RepositoryNotFoundError:
        created = True
        api.create_repo(repo, private=private)
    if created:
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        present = api.list_repo_files(repo, revision=revision)  # a new branch starts as main is
    others = [name for name in present if name not in KEPT]
    if others and not (update or created):
        raise InputError(
            f"{repo} exists already and holds {len(others)} files; add --update to replace them "
            "in one commit, or name another repository."
        )
    return [name for name in others if name not in plan.files]


def upload(
    api: HfApi, repo: str, revision: str | None, message: str, plan: Plan, stale: list[str]
) -> str:
    """Upload the large files one by one, then commit all; the commit's address."""
    additions = [CommitOperationAdd(name, content) for name, content in plan.files.items()]
    for addition in additions:
        if addition.path_in_repo.endswith(".safetensors"):
            print(f"uploading {addition.path_in_repo}", flush=True)
        api.preupload_lfs_files(repo, additions=[addition], revision=revision, free_memory=False)
    deletions = [CommitOperationDelete(name) for name in stale]
    done = api.create_commit(
        repo, [*additions, *deletions], commit_message=message, revision=revision
    )
    return done.commit_url


@contextmanager
def one_line(api: HfApi, repo: str, token: str) -> Iterator[None]:
    """Turn what the hub's client raises into one line that says what to do."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise InputError("the hub's client is offline: unset HF_HUB_OFFLINE.") from error
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        found = error
        while not isinstance(found, HTTPError) and isinstance(found.__cause__, Exception):
            found = found.__cause__
        line = _explain(found, api.endpoint, repo).replace(token, "***")
        raise InputError(line) from None  # the client's own error may hold the request


def _explain(error: Exception, endpoint: str, repo: str) -> str:
    again = "nothing was changed there; run the same command again to go on"
    if not isinstance(error, HfHubHTTPError):
        lost = isinstance(error, HTTPError | OSError)
        what = f"no answer from {endpoint}" if lost else f"{repo}: the upload failed"
        return f"{what}: {type(error).__name__}: {_first_line(error)}; {again}."
    status = error.response.status_code
    if status == 401:
        return f"{endpoint} refused the token (401); log in again with `hf auth login`."
    if status == 403:
        return f"the token may not write to {repo} (403); use one with write access there."
    if status == 409:
        return f"{repo} was changed meanwhile (409); {again}."
    said = error.server_message or _first_line(error)
    return f"{endpoint} refused {repo} ({status}): {said}; {again}."


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]
