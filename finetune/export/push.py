"""Push an export to the Hugging Face hub as one commit."""

from collections.abc import Sequence
from pathlib import Path

from data_prep.errors import SettingsError
from pretrain.checkpoints.hub import HUB, hub_errors

FIELD = "push_to"


def check_access(repository: str, *, private: bool) -> None:
    """Check the name and the token, and that a private export stays private."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    if repository.count("/") != 1:
        problem = f"{repository or 'nothing'} is not a repository"
        raise SettingsError(FIELD, problem, "write USER/NAME", code="bad-value")
    with hub_errors(FIELD, repository):
        HfApi().whoami()
        try:
            is_private = HfApi().model_info(repository).private
        except RepositoryNotFoundError:
            return  # `push` creates it
    if private and not is_private:
        fix = "add private=false if everybody may have these weights"
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
    """Push these files of the folder as one commit. Return the repository name with the hash of the
    commit.

    A missing branch is created. The same commit removes `obsolete` files.
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
