"""Push an export to the Hugging Face hub as one commit."""

from collections.abc import Sequence
from pathlib import Path

from data_prep.errors import SettingsError
from pretrain.checkpoints.hub import HUB, hub_errors

FIELD = "push_to"


def check_access(repository: str, *, private: bool) -> None:
    """Fail if the name or the token is not valid, or if `private` and the repository is public."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    if repository.count("/") != 1:
        problem = f"{repository!r} is not a repository name"
        raise SettingsError(FIELD, problem, "write USER/NAME", code="bad-value")
    with hub_errors(FIELD, repository):
        HfApi().whoami()
        try:
            is_private = HfApi().model_info(repository).private
        except RepositoryNotFoundError:
            return  # `push` creates it
    if private and not is_private:
        fix = "set private=false to publish these weights"
        raise SettingsError(FIELD, f"{repository} is public", fix, code="conflict")


def push(
    folder: Path,
    repository: str,
    *,
    files: Sequence[str],
    obsolete: Sequence[str],
    revision: str | None,
    private: bool,
) -> str:
    """Push `files` of the folder as one commit, which also deletes `obsolete` files. Return the
    repository name with the hash of the commit.

    A missing repository or branch is created.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    check_access(repository, private=private)
    with hub_errors(FIELD, repository):
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        present = set(api.list_repo_files(repository, revision=revision))
        removed = [CommitOperationDelete(each) for each in sorted(present & {*obsolete} - {*files})]
        added = [CommitOperationAdd(name, folder / name) for name in files]
        commit = api.create_commit(
            repository,
            [*removed, *added],
            commit_message=f"Export {folder.name}",
            revision=revision,
        )
    return f"{HUB}{repository}@{commit.oid}"
