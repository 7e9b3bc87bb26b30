"""Models by their names on Hugging Face's hub: where they lie in its cache on this machine. Nothing is downloaded, as compute
nodes reach no network: `hf download ORG/NAME` does that, into a cache (HF_HOME, HF_HUB_CACHE) that the nodes see, too."""

import re
from pathlib import Path

_NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?", re.ASCII)


def cached_model(name: str) -> str | None:
    """The folder of a model in the cache by its name, e.g. Qwen/Qwen2.5-7B or Qwen/Qwen2.5-7B@main; None where `name` is no
    such name, or the cache lacks the model. The folder is that of one commit: what is downloaded later lies elsewhere."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(found["id"], revision=found["revision"], local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def said_of_missing(folder: str) -> str:
    """What the cache has of a model that `cached_model` did not find and that so was taken for `folder`, a relative path made
    absolute: other revisions of it, or nothing; and which cache that is."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    found = re.search(rf"(?:^|/){_NAME.pattern}\Z", folder, re.ASCII)
    if found is not None:
        model, revision = found["id"], found["revision"] or "main"
        there = _revisions(Path(HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model"))
        if there:
            return f"the cache {HF_HUB_CACHE} has {model}, but not its revision {revision}, only {', '.join(there)}"
    return f"the cache {HF_HUB_CACHE} has no model of this name"


def _revisions(cached: Path) -> list[str]:
    """The revisions of a model in the cache: by the names of branches and tags, and the commits that have none."""
    commits = {snapshot.name for snapshot in cached.glob("snapshots/*")}
    refs = {str(path.relative_to(cached / "refs")): path.read_text() for path in cached.glob("refs/**/*") if path.is_file()}
    return sorted(name for name, commit in refs.items() if commit in commits) + sorted(commits - {*refs.values()})


def cache_of(folder: str) -> str:
    """What has to be seen with a model's folder: in the cache, its files are links to others beside it."""
    snapshots = Path(folder).parent
    return str(snapshots.parent) if snapshots.name == "snapshots" else folder
