"""Where schedule files lie: on disk, in the library, in repositories on the Hub."""

from __future__ import annotations

import logging
import os
import re
import threading
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers.utils.hub import cached_file

from .schedule_card import update_card
from .version import __version__

if TYPE_CHECKING:
    from .schedule import RecomputeSchedule

logger = logging.getLogger(__name__)

SCHEDULE_NAME = "vlcache_schedule.json"
# What the question for a schedule in a model's own repository may take. Without an answer the next source is used.
PEEK_TIMEOUT_S = 2.0

_PART = r"[A-Za-z0-9][\w.-]*"
# `org/name`, or a file in that repository. `runs/mine.json` is a path of somebody who mistyped it.
_ON_HUB = re.compile(rf"(?P<repo>{_PART}/{_PART}(?<!\.json))(?:/(?P<file>[^\\]+\.json))?")


def shipped_schedules() -> Path | None:
    """The folder of the schedule files that come with the library (inside the wheel, or beside a source checkout)."""
    packaged = Path(str(resources.files("vlcache_hf"))) / "schedules"
    checkout = Path(__file__).resolve().parent.parent / "schedules"
    return next((folder for folder in (packaged, checkout) if folder.is_dir()), None)


def shipped_file(name: str) -> Path | None:
    """The shipped file of a name, such as `Qwen3-VL-8B-Instruct` or `Qwen3-VL-8B-Instruct.b0.025.json`.

    Args:
        name (`str`): the name, with or without its `.json`. A name with a folder in it is none of a shipped file.
    """
    folder = shipped_schedules()
    if folder is None or not re.fullmatch(_PART, name):
        return None
    file = folder / f"{name.removesuffix('.json')}.json"
    return file if file.is_file() else None


def cached_repo_id(folder: str) -> str | None:
    """The repository whose snapshot a folder is, if it lies in the Hub's cache: such a folder is named by a commit,
    and the model's name stands further up.

    Args:
        folder (`str`): path of a local folder.
    """
    parts = os.path.abspath(folder).split(os.sep)
    repo = next((part for part in parts if part.startswith("models--")), None)
    return repo.removeprefix("models--").replace("--", "/") if repo else None


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `org/name` of a repository on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def loaded_commit(
    repo_id: str, revision: str | None = None, cache_dir: str | os.PathLike[str] | None = None
) -> str | None:
    """The commit that a model was loaded from, as the cache of the Hub tells (its config no longer does).

    Args:
        repo_id (`str`): what was passed to `from_pretrained`.
        revision (`str`, *optional*): the `revision` of that load.
        cache_dir (`str` or `os.PathLike`, *optional*): the `cache_dir` of that load.
    """
    if os.path.isdir(repo_id) or not is_hub_id(repo_id):
        return None
    config = try_to_load_from_cache(
        repo_id,
        "config.json",
        cache_dir=str(cache_dir or constants.HF_HUB_CACHE),
        # Transformers has resolved a branch by now; the plain string is that of the branch
        revision=getattr(revision, "resolved", revision),
    )
    return Path(config).parent.name if isinstance(config, str) else None


def locate(name: str | os.PathLike[str], file_name: str, *, subfolder: str = "", **download: Any) -> Path:
    """The file on disk that a name means: a path if there is one, a shipped file, or a download from the Hub.

    Args:
        name (`str` or `os.PathLike`): see `RecomputeSchedule.from_pretrained`.
        file_name (`str`): the file in a folder or repository.
        subfolder (`str`, *optional*): where in the folder or repository it lies.
        **download: arguments of Transformers' `cached_file`.

    Raises:
        `OSError`: nothing is found under the name; the message says where was looked.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text and path.is_dir():
        file = path / (subfolder or "") / file_name
        if not file.is_file():
            raise FileNotFoundError(f"The folder {text!r} has no {os.path.join(subfolder or '', file_name)}.")
        return file
    if path.is_file():
        return path
    # an `os.PathLike` is a path and never looked for elsewhere
    shipped = shipped_file(text) if isinstance(name, str) else None
    if shipped is not None:
        return shipped
    on_hub = _ON_HUB.fullmatch(text) if isinstance(name, str) else None
    if on_hub is None:
        raise FileNotFoundError(
            f"No schedule {text!r}: it is no file or folder here, no schedule that comes with the library, and no Hub "
            f'id such as "org/name". Give one of these (a {SCHEDULE_NAME}, a folder with one), a ratio such as 0.1 '
            'or "auto".'
        )
    wanted = on_hub["file"] or file_name
    try:
        found = cached_file(on_hub["repo"], wanted, subfolder=subfolder, **download)
    except OSError as error:
        raise OSError(f"No schedule {text!r}: it is no file or folder here, and on the Hub: {error}") from error
    if found is None:
        raise FileNotFoundError(f"No {wanted} in {on_hub['repo']!r} on the Hub.")
    return Path(found)


def peek(repo_id: str, commit: str) -> Path | None:
    """The schedule in the repository that a model was loaded from, if it has one and that is cheap to know.

    The cache of the Hub is asked first. It also remembers that a commit has no such file, so the question goes to the
    Hub once, and never in offline mode.

    Args:
        repo_id (`str`): the repository.
        commit (`str`): the commit that was loaded.
    """
    known = try_to_load_from_cache(repo_id, SCHEDULE_NAME, cache_dir=constants.HF_HUB_CACHE, revision=commit)
    if isinstance(known, str):
        return Path(known)
    if known is not None or is_offline_mode():
        return None
    found: list[Path] = []
    # in a thread, because no timeout of a request bounds the lookup of a host's name where there is no network
    thread = threading.Thread(target=_ask, args=(repo_id, commit, found), name="vlcache-schedule", daemon=True)
    thread.start()
    thread.join(PEEK_TIMEOUT_S)
    return found[0] if found else None


def _ask(repo_id: str, commit: str, found: list[Path]) -> None:
    try:
        # `hf_hub_download` alone would try again and again where there is no network
        get_hf_file_metadata(hf_hub_url(repo_id, SCHEDULE_NAME, revision=commit), timeout=PEEK_TIMEOUT_S)
        found.append(Path(hf_hub_download(repo_id, SCHEDULE_NAME, revision=commit, etag_timeout=PEEK_TIMEOUT_S)))
    except RemoteEntryNotFoundError:
        repo = repo_folder_name(repo_id=repo_id, repo_type="model")
        _remember_none(Path(constants.HF_HUB_CACHE, repo, ".no_exist", commit, SCHEDULE_NAME))
    except Exception as error:  # whatever it was, it only means that there is no schedule from there
        logger.debug("No answer about a %s in %s: %s", SCHEDULE_NAME, repo_id, error)


def _remember_none(file: Path) -> None:
    """Notes a missing file as `hf_hub_download` does."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        logger.debug("The cache of the Hub cannot be written to: %s", error)


def push(
    schedule: RecomputeSchedule,
    repo_id: str,
    file_name: str,
    *,
    commit_message: str,
    commit_description: str | None,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    create_pr: bool,
) -> str:
    """Commits a schedule and its section of the model card; see `RecomputeSchedule.push_to_hub`."""
    api = HfApi(token=token, library_name="vlcache-hf", library_version=__version__)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    info = api.model_info(repo_id, revision=revision)
    card = ""
    if any(sibling.rfilename == "README.md" for sibling in info.siblings or ()):
        # bytes, because reading as text would change the line ends of what is not ours
        card = Path(api.hf_hub_download(repo_id, "README.md", revision=info.sha)).read_bytes().decode("utf-8")
    operations = [
        CommitOperationAdd(file_name, schedule.to_json_string().encode()),
        CommitOperationAdd("README.md", update_card(card, schedule, repo_id, file_name).encode()),
    ]
    return api.create_commit(
        repo_id,
        operations,
        commit_message=commit_message,
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
        # a card that somebody edits in between is not overwritten: the Hub refuses the commit
        parent_commit=info.sha,
    )
