"""Shards in a data set's repository on the Hugging Face hub, `shards:hub:OWNER/NAME`: streamed as from any web server.

The hub says which tars there are, their bytes and their sums. The newest commit is asked for once, when a run begins,
and everything is fetched from that commit.
"""

import dataclasses
import re
from collections.abc import Mapping

from vitlab.data.shard_index import File

PREFIX = "hub:"


@dataclasses.dataclass(frozen=True)
class Site:
    """Where the files of a set lie.

    base: the address of their folder. tars: those that are known to be there, by name. token: what the server wants to
    be shown; it is not passed on to where the server sends one.
    """

    base: str
    tars: Mapping[str, File] = dataclasses.field(default_factory=dict)
    token: str | None = None


def find_site(spec: str) -> Site:
    """The folder `hub:OWNER/NAME`, `hub:OWNER/NAME@REVISION`, or `hub:OWNER/NAME/FOLDER`, at one commit.

    A revision is a branch, a tag or a commit. The hub's environment holds (`HF_TOKEN`, `HF_ENDPOINT`). Raises
    ValueError, with what to do.
    """
    found = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?", spec)
    if not found:
        raise ValueError(
            f"shards:{spec} is no place on the hub: write shards:hub:OWNER/NAME, shards:hub:OWNER/NAME@REVISION or "
            f"shards:hub:OWNER/NAME/FOLDER"
        )
    repository, revision, folder = found.groups()
    try:
        from huggingface_hub import HfApi, RepoFile, constants, errors, get_token  # slow, and of the extra `hub`
    except ModuleNotFoundError as error:
        raise ValueError(
            f"shards:{spec} needs the package huggingface-hub, which is not installed: pip install 'vitlab[hub]'"
        ) from error
    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        commit = api.repo_info(repository, revision=revision, repo_type="dataset").sha
        listed = api.list_repo_tree(repository, recursive=True, revision=commit, repo_type="dataset")
        tars = [each for each in listed if isinstance(each, RepoFile) and each.path.endswith(".tar")]
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{repository} has no revision {revision!r}; its page on the hub shows them") from error
    except (errors.RepositoryNotFoundError, errors.GatedRepoError) as error:
        raise ValueError(
            f"there is no data set {repository} on the hub, or not for everyone: look at the name; where it needs "
            f"consent, give it on its page and log in (`hf auth login`, or the variable HF_TOKEN)"
        ) from error
    except (errors.HTTPError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"the hub cannot be asked for {repository} ({reason}): try again later") from error
    place = folder or ""
    here = {each.path.rpartition("/")[2]: each for each in tars if each.path.rpartition("/")[0] == place}
    if not here:
        advice = f"where it is no set of shards, hub:{repository} reads it"
        if others := sorted({each.path.rpartition("/")[0] or "its root" for each in tars}):
            advice = f"it has some in {', '.join(others)}: give that one, as in shards:hub:{repository}/FOLDER"
        raise ValueError(f"{repository} has no tars{' in ' + place if folder else ''}; {advice}")
    return Site(
        "/".join(filter(None, (constants.ENDPOINT, "datasets", repository, "resolve", str(commit), place))),
        {name: File(name, each.size, each.lfs.sha256 if each.lfs else "") for name, each in sorted(here.items())},
        get_token(),
    )
