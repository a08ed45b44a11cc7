"""Weights on the Hugging Face hub: what a name there means, its files in the hub's own cache, and
an export as one commit there.

    hf-hub:USER/NAME[@REVISION]    a repository with model.safetensors and config.json, of `finetune export --push-to` or of timm
    timm:NAME[.TAG]                the repository that timm has the weights of this name in

Nothing but these files and sha256.json is fetched, and none of them is code or pickle. The revision
(a branch, by default main, a tag or a commit) is resolved once, and its commit recorded with
whatever is made of the weights. Endpoint, cache, offline mode and token are the library's own
(HF_ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE; HF_TOKEN or `hf auth login`); the token is never looked
at. No torch, except to find the weights that timm means by a name without a tag.
"""  # noqa: E501 (a table)

import difflib
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.errors import SettingsError, UserError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

HUB, TIMM = "hf-hub:", "timm:"
LOG_IN = "hf auth login, or set HF_TOKEN"


class HubError(UserError):
    """What the hub does not give; the text names it and the remedy."""


def is_on_hub(place: object) -> bool:
    return str(place).startswith((HUB, TIMM))


def fetch(name: str, *, files: Sequence[str]) -> tuple[Path, str]:
    """The folder with those of the files that there are, and the name with its commit. What is
    whole in the cache is not fetched again, and serves where the hub cannot be reached."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    known, _, revision = name.partition("@")
    repository = (
        _repository_of_timm(known.removeprefix(TIMM))
        if name.startswith(TIMM)
        else known.removeprefix(HUB)
    )
    check_name(repository, field=name)
    with _in_one_line(name, revision=revision):
        try:
            folder = Path(
                snapshot_download(repository, revision=revision or None, allow_patterns=list(files))
            )
        except LocalEntryNotFoundError as error:
            if isinstance(error.__cause__, HfHubHTTPError):
                raise error.__cause__ from None
            cached = f"is not whole in the cache ({constants.HF_HUB_CACHE})"
            if constants.is_offline_mode():
                remedy = f"unset it once, or run hf download {repository} where there is a network"
                raise HubError(f"{name}: {cached}, and HF_HUB_OFFLINE is set; {remedy}") from None
            why = _words(error.__cause__ or error)
            raise HubError(
                f"{name}: {cached}, and the hub cannot be reached ({why}); try again, or check"
                " HF_ENDPOINT"
            ) from None
    return folder, f"{HUB}{repository}@{folder.name}"


def push(
    folder: Path,
    repository: str,
    *,
    files: Sequence[str],
    revision: str | None,
    private: bool,
    obsolete: Sequence[str],
) -> str:
    """These files of the folder as one commit on a branch, which is made where it is not there yet;
    the name with that commit. `obsolete`: files that go in the same commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, name = HfApi(), f"{HUB}{repository}"
    with _in_one_line(name, revision=revision or ""):
        check_access(repository, private=private)
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        there = set(api.list_repo_files(repository, revision=revision))
        gone = [CommitOperationDelete(each) for each in sorted(there & set(obsolete) - {*files})]
        added = [CommitOperationAdd(name, folder / name) for name in files]
        done = api.create_commit(
            repository, [*gone, *added], commit_message=f"Export {folder.name}", revision=revision
        )
    return f"{name}@{done.oid}"


def check_access(repository: str, *, private: bool) -> None:
    """Before minutes of work: that there is a token, that the hub knows it, and that what should be
    private would be."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError

    name = f"{HUB}{repository}"
    with _in_one_line(name):
        try:
            HfApi().whoami()
            is_private = HfApi().model_info(repository).private
        except LocalTokenNotFoundError:
            raise HubError(
                f"push_to: {repository} needs a token, and there is none; {LOG_IN}"
            ) from None
        except RepositoryNotFoundError:
            return  # it will be made
    if private and not is_private:
        raise SettingsError(
            f"push_to: {repository} is public; add private=false if everybody may have these"
            " weights"
        )


def check_name(repository: str, *, field: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
        is_good = repository.count("/") == 1
    except HFValidationError:
        is_good = False
    if not is_good:
        raise SettingsError(
            f"{field}: {repository or 'nothing'} is no name on the hub; write USER/NAME"
        )


def _repository_of_timm(name: str) -> str:
    """With a tag, as timm names its repositories; else of the weights that it takes by default."""
    if "." in name:
        return f"timm/{name}"
    import timm

    repository = timm.get_pretrained_cfg_value(name, "hf_hub_id") if timm.is_model(name) else None
    if not repository:
        near = difflib.get_close_matches(name, timm.list_models(pretrained=True), n=3)
        remedy = (
            f"near are {', '.join(near)}"
            if near
            else "timm.list_models(pretrained=True) names them"
        )
        raise HubError(f"{TIMM}{name}: timm has no weights of this name on the hub; {remedy}")
    return str(repository)


@contextmanager
def _in_one_line(name: str, *, revision: str = "") -> Iterator[None]:
    """What goes wrong on the way, as one line with its remedy; what the library would print of it
    meanwhile is left out."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    library = logging.getLogger("huggingface_hub")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    except UserError:
        raise
    except HfHubHTTPError as error:
        raise HubError(f"{name}: {_told(error, name=name, revision=revision)}") from None
    except (httpx2.HTTPError, OSError, RuntimeError) as error:
        why = _words(error.__cause__ or error)
        raise HubError(
            f"{name}: the transfer broke off ({why}); the same command goes on with what is missing"
        ) from None
    finally:
        library.setLevel(level)


def _told(error: "HfHubHTTPError", *, name: str, revision: str) -> str:
    from huggingface_hub import constants, errors

    status, page = (
        error.response.status_code,
        f"{constants.ENDPOINT}/{name.removeprefix(HUB).partition('@')[0]}",
    )
    match error:
        case errors.GatedRepoError():
            return f"is gated; ask for it at {page}, then {LOG_IN}"
        case errors.RevisionNotFoundError():
            return f"there is no revision {revision!r}; name a branch, a tag or a commit"
        case errors.RepositoryNotFoundError():
            return f"is not there, or not for you; check its name, and for what is private {LOG_IN}"
    if status == 401:
        return f"the hub refuses the token (401); {LOG_IN} anew"
    if status == 403:
        return (
            "the token may not do this (403); make one that may, under Access Tokens of your hub"
            " account"
        )
    return f"the hub answers {status}; try again later"


def _words(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]
