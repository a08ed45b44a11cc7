"""Weights on the Hugging Face hub.

    hf-hub:USER/NAME[@REVISION]    a repository of `finetune export --push-to` or of timm
    timm:NAME[.TAG]                the repository of timm's weights with this name

Only model.safetensors, config.json and sha256.json are fetched, into the hub's own cache: no code
and no pickle. A revision (branch, tag or commit; by default main) is resolved once. Its commit is
recorded with all results of the weights. huggingface_hub's own environment variables set endpoint,
cache, offline mode and token. Torch is imported only for a timm name without a tag.
"""

import difflib
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data_prep.errors import Code, UserError

HUB, TIMM = "hf-hub:", "timm:"
LOG_IN = "run hf auth login, or set HF_TOKEN"


class HubError(UserError):
    """A request to the hub failed."""


def is_on_hub(place: object) -> bool:
    return str(place).startswith((HUB, TIMM))


def fetch(name: str, *, files: Sequence[str]) -> tuple[Path, str]:
    """Fetch the `files` that exist. If the hub cannot be reached, use the cache. Return the folder,
    and the name with its commit."""
    from huggingface_hub import snapshot_download

    known, _, revision = name.partition("@")
    repository = known.removeprefix(HUB)
    if name.startswith(TIMM):
        repository = _repository_of_timm(known.removeprefix(TIMM))
    with hub_errors(name, repository):
        folder = Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=list(files))
        )
    return folder, f"{HUB}{repository}@{folder.name}"


def _repository_of_timm(name: str) -> str:
    if "." in name:
        return f"timm/{name}"
    import timm

    repository = timm.get_pretrained_cfg_value(name, "hf_hub_id") if timm.is_model(name) else None
    if repository:
        return str(repository)
    near = difflib.get_close_matches(name, timm.list_models(pretrained=True), n=3)
    raise HubError(
        f"{TIMM}{name}",
        "timm has no weights with this name on the hub",
        f"choose one of {', '.join(near)}" if near else "see timm.list_models(pretrained=True)",
        code="unknown-name",
    )


@contextmanager
def hub_errors(field: str, repository: str) -> Iterator[None]:
    """Convert errors of huggingface_hub to a one-line `HubError`. Silence the library's output."""
    import httpx2
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    library = logging.getLogger("huggingface_hub")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    except (HFValidationError, httpx2.HTTPError, OSError, RuntimeError) as error:
        problem, fix, code = _explain(error, repository)
        raise HubError(field, problem, fix, code=code) from None
    finally:
        library.setLevel(level)


def _explain(error: BaseException, repository: str) -> tuple[str, str, Code]:
    from huggingface_hub import constants, errors

    reason = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0][:120]
    match error:
        case errors.LocalEntryNotFoundError(__cause__=errors.HfHubHTTPError() as cause):
            return _explain(cause, repository)
        case errors.LocalEntryNotFoundError():
            cached = f"is not complete in the cache ({constants.HF_HUB_CACHE})"
            if constants.is_offline_mode():
                fix = f"unset HF_HUB_OFFLINE, or run hf download {repository} with a network"
                return f"{cached}, and HF_HUB_OFFLINE is set", fix, "unreachable"
            problem = f"{cached}, and the hub cannot be reached ({reason})"
            return problem, "try again, or check HF_ENDPOINT", "unreachable"
        case errors.HFValidationError():
            return f"{repository!r} is not a repository", "write USER/NAME", "bad-value"
        case errors.GatedRepoError():
            fix = f"ask for access at {constants.ENDPOINT}/{repository}, then {LOG_IN}"
            return "access to the repository is restricted", fix, "no-access"
        case errors.RevisionNotFoundError():
            fix = "choose a branch, a tag or a commit"
            return "the repository has no such revision", fix, "missing-path"
        case errors.RepositoryNotFoundError():
            fix = f"check the name. For a private repository, {LOG_IN}"
            return "the repository does not exist, or is private", fix, "missing-path"
        case errors.LocalTokenNotFoundError():
            return f"{repository} needs a token, and there is none", LOG_IN, "no-access"
        case errors.HfHubHTTPError(response=response) if response.status_code == 401:
            return "the hub refuses the token (401)", f"{LOG_IN} again", "no-access"
        case errors.HfHubHTTPError(response=response) if response.status_code == 403:
            fix = "create a token with this permission, under Access Tokens of your hub account"
            return "the token does not allow this access (403)", fix, "no-access"
        case errors.HfHubHTTPError(response=response):
            return f"the hub answers {response.status_code}", "try again later", "unreachable"
    fix = "run the same command again to transfer the rest"
    return f"the transfer broke off ({reason})", fix, "unreachable"
