"""A run's own copy of the code, so that what is changed after the submission is not what runs."""

import shutil
from pathlib import Path

# What Python has compiled already is copied, too, or else all nodes compile it at their start: it counts for a file of the same
# size and time, which copies have. What it is just writing (NAME.pyc.NUMBER) is not.
_SKIPPED = shutil.ignore_patterns("*.pyc.*", ".*")


def snapshot_code(target: Path, slurm_folder: Path) -> None:
    """Copy the prl package that is running, the sbatch templates and, from a checkout, configs/ to `target`, replacing an
    older copy. Needs no git. Raises OSError."""
    package = Path(__file__).resolve().parents[1]
    if package.parent == target.resolve():
        return  # the run's own copy is what is running
    new = target.with_name(f"{target.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        shutil.copytree(package, new / package.name, ignore=_SKIPPED)
        shutil.copytree(slurm_folder, new / "slurm", ignore=_SKIPPED)
        configs = package.parent / "configs"
        if configs.is_dir() and (package.parent / "setup.cfg").is_file():
            shutil.copytree(configs, new / "configs", ignore=_SKIPPED)
    except shutil.Error as error:  # one entry a file
        _, first, why = error.args[0][0]
        free = shutil.disk_usage(target.parent).free
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(f"the code cannot be copied to {first}: {why} ({free / 2**20:.0f} MiB are free there)") from error
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if target.exists():
        shutil.rmtree(target)
    new.rename(target)
