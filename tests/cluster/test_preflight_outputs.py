"""What `lfs` and nvidia-smi print is read as what it means, on recordings, and anything else as nothing."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.cluster.mounts import mount_of, mounted
from prl.cluster.preflight.devices import Device, ask_devices, parse_devices
from prl.cluster.preflight.lustre import Limits, Target, parse_project, parse_quota, parse_targets
from prl.cluster.preflight.storage import ask_lustre

OUTPUTS = Path(__file__).with_name("outputs")
TEXTS = {path.name: path.read_text() for path in OUTPUTS.glob("*.txt")}
KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4


def quotas(name):
    return {(quota.owner, quota.filesystem): quota for quota in parse_quota(TEXTS[name])}


def test_quotas_with_their_limits_and_without():
    found = quotas("lfs_quota_cases.txt")
    assert list(found) == [
        ("usr user01", "/lustre7"),
        ("user user01", "/lustre/user01/user01/"),  # a line of its own
        ("usr user01", "/home/user"),
        ("prj 10052", "/scratch1"),
        ("usr user01", "/lustre/fs0"),
    ]  # and not the one of NFS, which has other columns
    big, none, human, project, soft = found.values()
    assert big.blocks == Limits(982177580 * KIB, 0, 1000000000 * KIB, False, "-")
    assert (big.blocks.left, big.files.left) == (17822420 * KIB, None)
    assert (none.blocks, none.blocks.left) == (Limits(119457928 * KIB, 0, 0, False, "-"), None)
    assert human.blocks == Limits(99 * GIB + 99 * GIB // 100, 0, 100 * GIB, False, "-")
    assert human.files.left == 1048576 - 921718
    assert project.blocks == Limits(4 * KIB, 1048576 * KIB, 1258291 * KIB, False, "*")
    assert (project.files.soft, project.files.left) == (100000, 119999)
    assert soft.blocks == Limits(394 * GIB + GIB // 2, 500 * GIB, 510 * GIB, False, "-")


def test_a_quota_that_is_exceeded_and_what_is_left_of_it():
    ((key, quota),) = quotas("lfs_quota_v_manual_grace.txt").items()
    assert key == ("user bob", "/mnt/testfs")
    assert quota.blocks == Limits(30720 * KIB, 30720 * KIB, 30920 * KIB, True, "6d23h56m44s")
    assert quota.blocks.left == 200 * KIB
    assert (quota.files.over, quota.files.used, quota.files.left) == (True, 10101, 899)
    assert Limits(30720, 20000, 30920, True, "none").left == 0
    ((key, quota),) = quotas("lfs_quota_delimiter_multi_fs_man.txt").items()  # of several, those that say limits
    assert (key, quota.blocks.used, quota.files.used) == (("usr root", "/mnt/lustre"), 4360 * KIB, 265)
    (inexact,) = parse_quota("Disk quotas for usr a (uid 1):\n /l [5236*] 0 5236 none [308] 0 0 -\n")
    assert (inexact.blocks.over, inexact.blocks.left, inexact.files.used) == (True, 0, 308)


@pytest.mark.parametrize(
    ("name", "fullest", "count", "down"),
    [
        ("lfs_df_h_big.txt", Target("scratch2-OST0000_UUID", 3 * TIB + 7 * TIB // 10, 88), 4, ()),
        ("lfs_df_h_manual_full_ost.txt", Target("testfs-OST0002_UUID", 155 * MIB + MIB // 10, 86), 6, ()),
        ("lfs_df_h_ost_full_100.txt", Target("myth-OST0001_UUID", 64 * KIB, 100), 5, ()),
        (
            "lfs_df_h_unavailable_ost.txt",
            Target("fs01-OST0000_UUID", 9 * TIB, 10),
            1,
            ("fs01-OST0001_UUID: Resource temporarily unavailable",),
        ),
        (
            "lfs_df_inactive_old_uuidless.txt",
            Target("fs-OST0000_UUID", 2 * GIB + 6 * GIB // 10, 1),
            3,
            ("OST0001: inactive device", "OST0003: inactive device", "OST0005: inactive device"),
        ),
    ],
)
def test_storage_targets_the_fullest_and_those_that_are_down(name, fullest, count, down):
    found = parse_targets(TEXTS[name])
    assert (found.fullest, len(found.there), found.down) == (fullest, count, down)


def test_without_units_sizes_are_kib():
    (target,) = parse_targets("scratch-OST0000_UUID  31040380000 26950000000 3972900000  88% /lustre[OST:0] D\n").there
    assert target == Target("scratch-OST0000_UUID", 3972900000 * KIB, 88)


def test_the_mount_of_a_folder_is_the_innermost():
    mounts = [tuple(line.split()[1:3]) for line in TEXTS["proc_mounts_lustre.txt"].splitlines()]
    assert mount_of(Path("/work/ann/run"), [("/", "ext4"), *mounts]) == ("/work", "lustre")
    assert mount_of(Path("/works/ann/run"), [("/", "ext4"), *mounts]) == ("/", "ext4")
    assert mount_of(Path("/work/ann"), [*mounts, ("/work/ann", "nfs4"), ("/work/ann", "xfs")]) == ("/work/ann", "xfs")
    assert mount_of(Path("/nowhere"), []) == ("", "")
    assert mount_of(Path("/proc/self"), mounted()) == ("/proc", "proc")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a program on PATH that prints a text and notes what it was asked."""

    def put(name, script):
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "asked"

    return put


def test_lfs_is_asked_about_the_mount_and_only_of_lustre(tmp_path, program):
    assert ask_lustre(tmp_path, lambda: [(str(tmp_path), "lustre")]) is None  # no lfs here
    quota, df = OUTPUTS / "lfs_quota_cases.txt", OUTPUTS / "lfs_df_h_unavailable_ost.txt"
    asked = program("lfs", f"[ $1 = df ] && cat {df} && exit 11\ncat {quota}")
    found = ask_lustre(tmp_path / "run", lambda: [("/", "ext4"), (str(tmp_path), "lustre")])
    assert [len(found[0]), len(found[1].down)] == [5, 1]
    assert asked.read_text().splitlines() == [f"quota {tmp_path}", f"project -d {tmp_path}/run", f"df {tmp_path}"]
    assert ask_lustre(tmp_path, lambda: [(str(tmp_path), "nfs4")]) is None


def test_the_quota_of_the_folders_project_counts_too(tmp_path, program):
    usual, full = "Disk quotas for usr ann (uid 1):\n /l 5 0 0 - 3 0 0 -", " /l\n 322.5T 327T 327T - 18005642 0 0 -"
    project = f"[ $2 = -p ] && echo 'Disk quotas for prj 200020 (pid 200020):\n{full}' && exit"
    program("lfs", f"[ $1 = project ] && echo '200020 P '$3 && exit\n[ $1 = df ] && exit\n{project}\necho '{usual}'")
    user, project = ask_lustre(tmp_path, lambda: [(str(tmp_path), "lustre")])[0]
    assert (user.owner, project.owner, project.files.left) == ("usr ann", "prj 200020", None)
    assert project.blocks.left == 4 * TIB + TIB // 2


@pytest.mark.parametrize(
    ("text", "project"),
    [
        ("110255 P /projects/one\n", 110255),
        ("2228473301 P /lus/a b\n", 2228473301),
        ("  307 - /lus/one\n", 307),  # given to the folder alone
        ("    0 - /lus/one\n", None),
        ("", None),
        ("lfs: invalid command 'project'\n", None),
        ("12 P /one\n13 P /two\n", None),
    ],
)
def test_the_project_of_a_folder(text, project):
    assert parse_project(text) == project


def test_devices_of_a_recording_with_all_fields():
    found = parse_devices(TEXTS["nvidia_smi_query_gpu_all_fields_csv__h200_590.48.01.txt"])
    assert found.there == (Device(0, "NVIDIA H200", 0, 0, False, False),)
    assert found.said == ()


def test_devices_that_are_broken_lost_or_say_little():
    found = parse_devices(TEXTS["nvidia_smi_query_gpu_selected.csv.txt"])
    well, broken, mig, old, lost = found.there
    assert well == Device(0, "NVIDIA A100 80GB PCIe", None, 0, False, False)
    assert broken == Device(1, "NVIDIA A100 80GB PCIe", None, 2, True, False)
    assert (mig.index, mig.uncorrected_errors, mig.repair_pending, mig.repair_failed, mig.lost) == (2, None, None, None, "")
    assert (old.name, old.uncorrected_errors, old.repair_pending, old.lost) == ("Tesla V100-SXM2-32GB", None, False, "")
    assert (lost.index, lost.lost) == (4, "[GPU is lost]")
    assert found.said == ()


def test_every_error_that_nvidia_smi_prints_is_kept():
    lines = TEXTS["nvidia_smi_errors.txt"].splitlines()
    found = parse_devices("\n".join(lines))
    assert (found.there, found.said) == ((), tuple(lines))


def test_nvidia_smi_is_asked_where_there_is_one(tmp_path, program, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program("other", "")
    assert ask_devices() is None
    asked = program("nvidia-smi", "echo 'index, uuid, memory.used [MiB]'; echo '3, GPU-1, 12 MiB'; echo lost >&2; exit 15")
    found = ask_devices()
    assert [(device.index, device.used_bytes) for device in found.there] == [(3, 12 * MIB)]
    assert found.said == ("lost",)
    assert asked.read_text().startswith("--query-gpu=index,uuid,name,memory.used,")
    program("nvidia-smi", "exit 15")
    assert ask_devices().said == ("nvidia-smi ended with code 15",)


@pytest.mark.parametrize(
    ("named", "told"), [("5,3", [3, 5]), ("", []), ("GPU-3a,GPU-5b", [2, 3, 5]), ("NoDevFiles", [2, 3, 5])]
)
def test_only_devices_that_the_job_was_given_are_told(program, monkeypatch, named, told):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    program("nvidia-smi", "printf 'index, memory.used [MiB]\\n2, 80000 MiB\\n3, 1 MiB\\n5, 1 MiB\\n'")
    assert [device.index for device in ask_devices().there] == told


LINES = st.lists(st.sampled_from([line for text in TEXTS.values() for line in text.splitlines()]), max_size=12)
CUTS = st.tuples(st.integers(0, 60), st.integers(0, 60), st.text(max_size=8))


@given(LINES, CUTS, st.text(max_size=40))
@settings(deadline=None)
def test_no_text_is_too_odd_for_any_parser(lines, cut, tail):
    """Lines of all recordings in any order, cut and with anything in them."""
    begin, length, inserted = cut
    text = "\n".join(lines)
    for odd in (text, text[:begin] + inserted + text[begin + length :], tail):
        for quota in parse_quota(odd):
            assert all(limits.left is None or limits.left >= 0 for limits in (quota.blocks, quota.files))
        targets = parse_targets(odd)
        assert targets.fullest is None or targets.fullest in targets.there
        devices = parse_devices(odd)
        written = [line for line in odd.splitlines() if line.strip()]
        assert len(devices.there) + len(devices.said) <= len(written)
