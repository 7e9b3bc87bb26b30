"""Versions in files, written by processes and read by others."""

import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from prl.flow.versions import Version
from prl.runfolder.weights import (
    MODULUS,
    StoredError,
    StoredFile,
    StoredVersion,
    folder_of,
    give_up,
    new_folder,
    publish_version,
    read_version,
    remove_before,
)
from prl.weights.digest import digest, slab, total
from prl.weights.folder import Slab, VersionReader, write_pieces, write_version
from prl.weights.plan import TensorSpec
from prl.weights.tensor_files import write_tensors
from prl.weights.transport import spec_of

VERSION = Version(1, 12)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(24, 6, generator=generator).bfloat16(),
        "columns": torch.randn(5, 16, generator=generator),
        "norm": torch.randn(8, generator=generator),
        "scalar": torch.tensor(3.5),
    }


def specs(of: dict[str, torch.Tensor]) -> dict[TensorSpec, torch.Tensor]:
    return {spec_of(name, tensor): tensor for name, tensor in of.items()}


def reader(weights: Path, wait_s: float = 0.0) -> VersionReader:
    return VersionReader(weights, VERSION, specs(tensors()), wait_s)


def store_shard(folder: Path, rank: int, ranks: int) -> list[dict]:
    """What a rank of a giver writes: rows of one tensor, columns of another, the rest by the first."""
    whole = tensors()
    split = {"rows": 0, "columns": 1} | ({"norm": None, "scalar": None} if rank == 0 else {})
    pieces = []
    for name, dim in split.items():
        spec = spec_of(name, whole[name])
        if dim is None:
            pieces.append((Slab.whole(spec), whole[name]))
            continue
        size = spec.shape[dim] // ranks
        pieces.append((Slab(spec, dim, rank * size, size), whole[name].narrow(dim, rank * size, size)))
    return [file.to_json() for file in write_pieces(folder, f"rank_{rank}", pieces)]


def read_all(weights: Path) -> int:
    """The digest of a version as another process reads it whole."""
    files = VersionReader(weights, VERSION, specs(tensors()), 20.0)
    return digest({spec.name: files.read(Slab.whole(spec), verify=False) for spec in specs(tensors())})


def test_what_one_process_writes_others_read_by_any_shares(tmp_path):
    whole = tensors()
    stored = write_version(tmp_path, VERSION, specs(whole), file_bytes=400)
    assert stored.digest == digest(whole)
    folder = tmp_path / "1_12"
    assert {path.name for path in tmp_path.iterdir()} == {"1_12"}
    names = {name for file in stored.files for name in safe_open(folder / file.path, framework="pt").offset_keys()}
    assert (len(stored.files), names) == (2, set(whole))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(read_all, (tmp_path,)) == stored.digest
    for spec, tensor in specs(whole).items():
        for dim, all_of in enumerate(spec.shape):
            for start, size in ((0, all_of), (1, all_of - 1), (all_of // 2, 1)):
                for verify in (False, True):
                    part = reader(tmp_path).read(Slab(spec, dim, start, size), verify=verify)
                    assert torch.equal(part, tensor.narrow(dim, start, size))


def test_ranks_write_their_parts_and_other_splits_read_them(tmp_path):
    folder = new_folder(tmp_path, VERSION)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        parts = pool.starmap(store_shard, [(folder, rank, 2) for rank in range(2)])
    assert read_error(tmp_path).endswith("No such file or directory")  # nothing counts before the manifest
    files = [StoredFile.from_json(json.loads(json.dumps(file))) for part in parts for file in part]
    publish_version(folder, StoredVersion(VERSION, digest(tensors()), files))
    for spec, tensor in specs(tensors()).items():
        assert torch.equal(reader(tmp_path).read(Slab.whole(spec), verify=True), tensor)
    rows = spec_of("rows", tensors()["rows"])
    for rank in range(4):
        part = reader(tmp_path).read(Slab(rows, 0, rank * 6, 6), verify=False)
        assert torch.equal(part, tensors()["rows"][rank * 6 : rank * 6 + 6])


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), dim=st.integers(0, 1), cut=st.integers(0, 9), seed=st.integers(0, 99))
def test_the_digests_of_two_slabs_are_that_of_the_tensor(rows, columns, dim, cut, seed):
    tensor = torch.randint(-9, 9, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    cut = min(cut, tensor.shape[dim])
    parts = [tensor.narrow(dim, 0, cut), tensor.narrow(dim, cut, tensor.shape[dim] - cut)]
    found = [slab("a", part.contiguous(), tensor.shape, dim, start) for part, start in zip(parts, (0, cut), strict=True)]
    assert total(found) % MODULUS == digest({"a": tensor})


def read_error(weights: Path) -> str:
    with pytest.raises(StoredError) as error:
        [reader(weights).read(Slab.whole(spec), verify=False) for spec in specs(tensors())]
    return str(error.value)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "rank_0_0.safetensors").unlink(), "rank_0_0.safetensors: No such file or directory"),
        (lambda folder: truncate(folder / "rank_0_0.safetensors"), "rank_0_0.safetensors: has 700 bytes, of "),
        (lambda folder: flip(folder / "rank_0_0.safetensors", -3), "rank_0_0.safetensors: rows is damaged: digest "),
        (lambda folder: flip(folder / "rank_0_0.safetensors", 9), "rank_0_0.safetensors: cannot be read: "),
        (lambda folder: flip(folder / "manifest.json", 20), "manifest.json: does not fit its own checksum"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: is no manifest of a version"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: cannot be read within 0 s: No such file"),
        (lambda folder: as_pipe(folder / "manifest.json"), "manifest.json: cannot be read within 0 s: is no regular file"),
        (lambda folder: folder.rename(folder.with_name("1_11")), "manifest.json: cannot be read within 0 s: No such file"),
    ],
    ids=[
        "missing",
        "torn",
        "damaged",
        "damaged header",
        "manifest changed",
        "manifest torn",
        "manifest missing",
        "manifest a pipe",
        "no folder",
    ],
)
def test_a_file_that_is_not_what_was_written_is_refused_by_its_name(tmp_path, damage, words):
    write_version(tmp_path, VERSION, specs(tensors()))
    damage(tmp_path / "1_12")
    said = read_error(tmp_path)
    assert words in said
    assert str(tmp_path / "1_12") in said


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:700])


def test_a_manifest_of_another_version_is_refused(tmp_path):
    write_version(tmp_path, Version(1, 11), specs(tensors()))
    (tmp_path / "1_11").rename(tmp_path / "1_12")
    assert read_error(tmp_path) == f"{tmp_path}/1_12/manifest.json: is of version 1:11"


def test_a_part_that_is_taken_alone_is_verified_where_that_is_asked_for(tmp_path):
    write_version(tmp_path, VERSION, specs(tensors()))
    flip(tmp_path / "1_12" / "rank_0_0.safetensors", -3)
    spec = spec_of("rows", tensors()["rows"])
    part = Slab(spec, 0, 0, 2)  # another part than the damaged one, or not: only the whole piece has a digest
    reader(tmp_path).read(part, verify=False)
    with pytest.raises(StoredError, match="rows is damaged"):
        reader(tmp_path).read(part, verify=True)


def test_pieces_that_do_not_make_up_the_version_are_not_published(tmp_path):
    folder = new_folder(tmp_path, VERSION)
    spec = spec_of("norm", tensors()["norm"])
    files = write_pieces(folder, "rank_0", [(Slab.whole(spec), tensors()["norm"])])
    with pytest.raises(StoredError, match="its pieces add up to digest"):
        publish_version(folder, StoredVersion(VERSION, digest(tensors()), files))
    assert not folder_of(tmp_path, VERSION).exists()
    publish_version(folder, StoredVersion(VERSION, digest({"norm": tensors()["norm"]}), files))
    assert "holds 0 of 144 elements of rows" in read_error(tmp_path)


def test_tensors_that_the_version_has_not_are_refused(tmp_path):
    write_version(tmp_path, VERSION, specs(tensors() | {"more": torch.zeros(2)}))
    assert read_error(tmp_path) == f"{tmp_path}/1_12: holds more (1 such), which the version has not"


def test_a_version_that_is_written_again_leaves_the_readers_of_the_first_alone(tmp_path):
    write_version(tmp_path, VERSION, specs(tensors(1)))
    first = reader(tmp_path)
    spec = spec_of("rows", tensors()["rows"])
    write_version(tmp_path, VERSION, specs(tensors(2)))
    assert len(list(tmp_path.glob(".old-1_12-*"))) == 1
    assert torch.equal(reader(tmp_path).read(Slab.whole(spec), verify=True), tensors(2)["rows"])
    with pytest.raises(StoredError, match="rows is damaged"):  # it had not opened its files yet; half of each is never taken
        first.read(Slab.whole(spec), verify=True)


def test_what_nobody_needs_is_removed_and_nothing_else(tmp_path):
    for step in (9, 10, 11):
        write_version(tmp_path, Version(1, step), specs({"norm": tensors()["norm"]}))
    write_version(tmp_path, Version(0, 30), specs({"norm": tensors()["norm"]}))
    new_folder(tmp_path, Version(1, 9))
    begun = new_folder(tmp_path, Version(1, 12))
    give_up(tmp_path / "1_10")
    (tmp_path / "notes").mkdir()
    remove_before(tmp_path, Version(1, 11))
    assert {path.name for path in tmp_path.iterdir()} == {"1_11", begun.name, "notes"}
    remove_before(tmp_path, None)
    assert {path.name for path in tmp_path.iterdir()} == {"notes"}
    remove_before(tmp_path / "never there", None)


def test_a_name_that_shows_late_is_waited_for(tmp_path):
    later = threading.Timer(0.4, write_version, (tmp_path, VERSION, specs(tensors())))
    later.start()
    assert read_version(tmp_path, VERSION, wait_s=20.0).digest == digest(tensors())
    later.join()


@pytest.mark.parametrize(("umask", "mode"), [(0o027, 0o640), (0o077, 0o600)])
def test_files_of_versions_and_models_are_readable_to_whom_the_umask_lets_in(tmp_path, umask, mode):
    """In a run that is shared with a group, the umask lets that in; safetensors alone never would."""
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "new", tensors())
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == mode
    with safe_open(tmp_path / "new", framework="pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors().items())
