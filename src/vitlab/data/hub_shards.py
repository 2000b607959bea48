"""Shards in a data set's repository on the Hugging Face hub, `shards:hub:OWNER/NAME`: streamed as from any web server.

The hub says which tars there are, their bytes and their sums. The newest commit is asked for once in a process, and
everything is fetched from that commit.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping

from vitlab.data.shard_index import File
from vitlab.errors import UserError

PREFIX = "hub:"


@dataclasses.dataclass(frozen=True)
class Site:
    """Where the files of a set lie.

    base: the address of their folder. called: what stays the same when only the commit changes. tars: those that are
    known to be there, by name. token: what the server wants to be shown, and no other.
    """

    base: str
    called: str
    tars: Mapping[str, File] = dataclasses.field(default_factory=dict)
    token: str | None = dataclasses.field(default=None, repr=False)

    def identity(self, pattern: str | None) -> bytes:
        """Of tars without an `index.json`: another one where they are others, as far as is known."""
        tars = [(tar.file, tar.bytes, tar.sha256) for tar in self.tars.values()]
        return "/".join(filter(None, (self.called, pattern, str(tars) if tars else ""))).encode()


@functools.cache
def find_site(spec: str) -> Site:
    """The folder `hub:OWNER/NAME`, `hub:OWNER/NAME@REVISION`, or `hub:OWNER/NAME/FOLDER`, at one commit.

    A revision is a tag, a commit, or a branch without a slash in its name. The hub's environment holds (`HF_TOKEN`,
    `HF_ENDPOINT`). Raises ValueError, with what to do.
    """
    found = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?", spec)
    if not found:
        raise UserError(
            f"shards:{spec} is no place on the hub: write shards:hub:OWNER/NAME, shards:hub:OWNER/NAME@REVISION or "
            f"shards:hub:OWNER/NAME/FOLDER"
        )
    repository, revision, folder = found.groups()
    try:
        from huggingface_hub import HfApi, constants, errors, get_token  # slow, and of the extra `hub`
        from huggingface_hub.hf_api import RepoFile
    except ModuleNotFoundError as error:
        raise UserError(
            f"shards:{spec} needs the package huggingface-hub, which is not installed: pip install 'vitlab[hub]'"
        ) from error
    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        commit = api.repo_info(repository, revision=revision, repo_type="dataset").sha
        listed = api.list_repo_tree(repository, recursive=True, revision=commit, repo_type="dataset")
        tars = [each for each in listed if isinstance(each, RepoFile) and each.path.endswith(".tar")]
    except errors.RevisionNotFoundError as error:
        lacks = f"revision {revision!r}; its page on the hub shows them" if revision else "commit: it is empty"
        raise UserError(f"{repository} has no {lacks}") from error
    except (errors.RepositoryNotFoundError, errors.GatedRepoError) as error:
        raise UserError(
            f"there is no data set {repository} on the hub, or not for everyone: look at the name; where it needs "
            f"consent, give it on its page and log in (`hf auth login`, or the variable HF_TOKEN)"
        ) from error
    except (errors.HTTPError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".:")
        advice = "try again later"
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            advice = "log in again (`hf auth login`, or the variable HF_TOKEN)"
        elif constants.HF_HUB_OFFLINE:
            advice = "unset HF_HUB_OFFLINE, or give a folder that holds the shards, shards:PATH"
        raise UserError(f"the hub cannot be asked for {repository} ({reason}): {advice}") from error
    place = folder or ""
    here = {each.path.rpartition("/")[2]: each for each in tars if each.path.rpartition("/")[0] == place}
    if not here:
        advice = f"where it is no set of shards, hub:{repository} reads it"
        if others := sorted({each.path.rpartition("/")[0] or "its root" for each in tars}):
            advice = f"it has some in {', '.join(others)}: give that one, as in shards:hub:{repository}/FOLDER"
        raise UserError(f"{repository} has no tars{' in ' + place if folder else ''}; {advice}")
    return Site(
        "/".join(filter(None, (constants.ENDPOINT, "datasets", repository, "resolve", str(commit), place))),
        "/".join(filter(None, ("hub", repository, place))),
        {name: File(name, each.size, each.lfs.sha256 if each.lfs else "") for name, each in sorted(here.items())},
        get_token(),
    )
