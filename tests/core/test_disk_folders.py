"""Folders for states on disk: wrong ones are refused, slow ones are warned of, and their space is counted."""

import os
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

from offload_core import ConfigError, ConfigWarning
from offload_core.disk import folders
from offload_core.disk.folders import check_folder, check_folders, file_system, free_bytes
from tests.support.mounts import mounted

ON_DISK = "25 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"


@pytest.fixture
def mounts(monkeypatch, tmp_path_factory):
    """Sets the kernel's list of mounts, to that of one disk at first."""
    path = tmp_path_factory.mktemp("proc") / "mountinfo"
    monkeypatch.setattr(folders, "MOUNTS", path)
    path.write_text(ON_DISK)
    return path.write_text


@contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- wrong folders -----------------------------------------------------------------------------------


def test_a_folder_on_a_disk_is_taken_and_left_as_it_was(mounts, tmp_path):
    with no_warning():
        check_folders([str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("none", "got '.*none', which does not exist; expected an existing folder on a disk: make it first"),
        ("file/below", "got '.*file/below', which does not exist"),
        ("dangling", "got '.*dangling', which does not exist"),
        ("circle", "got '.*circle', which cannot be read .Too many levels of symbolic links.; expected"),
        ("n" * 300, "got '.*nnn', which cannot be read .File name too long.; expected"),
        ("\ud800", "got '.*ud800', which cannot be read .*surrogates not allowed"),
        ("file", "got '.*file', which is not a folder; expected an existing folder on a disk"),
    ],
    ids=["missing", "below a file", "dangling", "circle", "long", "surrogate", "file"],
)
def test_what_is_no_folder_is_refused_by_name(mounts, tmp_path, name, match):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for check in (check_folder, lambda folder: check_folders([str(tmp_path), folder])):
        with pytest.raises(ConfigError, match=f"^nvme_path: {match}"):
            check(str(tmp_path / name))
    if name != "file":
        with pytest.raises(ConfigError, match=f"^nvme_path: {match}"):
            free_bytes([str(tmp_path), str(tmp_path / name)])
    assert (tmp_path / "file").read_text() == "mine"


@contextmanager
def nobody():
    """Without root's rights."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("mode", [0o555, 0o666])
def test_a_folder_in_which_this_process_may_not_write_is_refused(mounts, mode):
    """Also where root started the process, which then acts for another user."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "states"
        folder.mkdir()
        os.chmod(top, 0o755)
        folder.chmod(mode)
        with nobody(), pytest.raises(ConfigError, match=f"got '{folder}', in which this process may not make files"):
            check_folder(str(folder))
        folder.chmod(0o777)
        with nobody(), no_warning():
            check_folder(str(folder))
        os.chmod(top, 0o700)
        if not os.geteuid():
            with nobody(), pytest.raises(ConfigError, match=f"got '{folder}', which cannot be read .Permission denied"):
                check_folder(str(folder))


def test_a_read_only_file_system_is_refused(tmp_path):
    with mounted(tmp_path, "ro"), pytest.raises(ConfigError, match=f"got '{tmp_path}', on a file .* that is read-only"):
        check_folder(str(tmp_path))


def test_a_file_system_that_says_it_is_read_only_is_refused(mounts, monkeypatch, tmp_path):
    """As above, where nothing can be mounted."""
    found = os.statvfs(tmp_path)
    read_only = os.statvfs_result([*found[:8], found.f_flag | os.ST_RDONLY, *found[9:]])
    monkeypatch.setattr(os, "statvfs", lambda folder: read_only)
    with pytest.raises(ConfigError, match="on a file system that is read-only; expected an existing folder"):
        check_folder(str(tmp_path))


# --- slow folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "ceph", "gpfs"])
def test_a_network_file_system_is_warned_of(mounts, tmp_path, kind):
    mounts(ON_DISK + f"30 25 0:50 / {tmp_path} rw - {kind} server:/home rw\n")
    with pytest.warns(ConfigWarning, match=f"nvme_path: '{tmp_path}' is on a network file system .{kind}.: ") as caught:
        check_folder(str(tmp_path))
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_a_file_system_in_memory_is_warned_of(mounts, tmp_path, kind):
    mounts(ON_DISK + f"30 25 0:50 / {tmp_path} rw - {kind} none rw\n")
    with pytest.warns(ConfigWarning, match=f"'{tmp_path}' is in memory .{kind}., .*or offload_optimizer='cpu'"):
        check_folder(str(tmp_path))


def test_a_real_file_system_in_memory_is_warned_of(tmp_path):
    with mounted(tmp_path), pytest.warns(ConfigWarning, match="is in memory .tmpfs."):
        check_folder(str(tmp_path))


def test_without_the_kernels_list_of_mounts_nothing_is_warned_of(mounts, monkeypatch, tmp_path):
    monkeypatch.setattr(folders, "MOUNTS", tmp_path / "none")
    with no_warning():
        check_folder(str(tmp_path))


def test_two_folders_on_one_disk_are_warned_of_and_one_folder_by_two_names_is_refused(mounts, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    a, b, link = (str(tmp_path / name) for name in ("a", "b", "link"))
    with pytest.warns(ConfigWarning, match=f"'{a}' and '{b}' are on the same disk, .*expected one folder on each disk"):
        check_folders([a, b])
    for other in (link, a):
        with pytest.raises(ConfigError, match=f"nvme_path: '{a}' and '{other}' are one folder; expected each"):
            check_folders([a, other])


MOUNT_POINTS = r"""
25 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
26 25 0:24 / /sys rw - sysfs sysfs rw
30 25 254:16 / /data rw shared:7 master:1 - xfs /dev/vdb rw
31 30 0:50 /exports /data/shared rw - nfs4 server:/ rw
32 25 0:51 / /with\040space\134 rw - cifs //server/share rw
33 25 254:32 / /twice rw - ext4 /dev/vdc rw
34 33 0:52 / /twice rw - tmpfs none rw
35 25 0:53 / /wörter rw - fuse.sshfs host:/a - b rw
a line of another form
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "ext4"),
        ("/home/me", "ext4"),
        ("/data", "xfs"),
        ("/data/deep/below", "xfs"),
        ("/data/shared/states", "nfs4"),
        ("/data/sharedtoo", "xfs"),
        ("/data/shared/../states", "xfs"),
        ("/with space\\/states", "cifs"),
        ("/with", "ext4"),
        ("/twice/states", "tmpfs"),
        ("/wörter/x", "fuse.sshfs"),
    ],
)
def test_a_folder_is_on_the_innermost_and_latest_mount_above_it(tmp_path, folder, kind):
    (tmp_path / "mountinfo").write_text(MOUNT_POINTS, encoding="utf-8")
    assert file_system(folder, tmp_path / "mountinfo") == kind


def test_a_link_is_followed_to_its_file_system(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "mountinfo").write_text(ON_DISK + f"30 25 0:50 / {tmp_path}/elsewhere rw - nfs server:/ rw\n")
    assert file_system(str(tmp_path / "link"), tmp_path / "mountinfo") == "nfs"


def test_a_list_without_the_root_knows_nothing_of_other_folders(tmp_path):
    (tmp_path / "mountinfo").write_text("30 25 0:50 / /data rw - nfs server:/ rw\n")
    assert file_system("/home", tmp_path / "mountinfo") is None


# --- space -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disks", "expected"),
    [
        ({"a": (1, 1000)}, 1000),
        ({"a": (1, 1000), "b": (2, 600)}, 1200),
        ({"a": (1, 1000), "b": (1, 1000)}, 1000),
        ({"a": (1, 1000), "b": (1, 1000), "c": (2, 400)}, 1200),
        ({"a": (1, 1000), "b": (1, 1000), "c": (2, 600)}, 1500),
        ({"a": (1, 0), "b": (2, 600)}, 0),
    ],
    ids=str,
)
def test_as_many_bytes_fit_as_equal_shares_of_each_disk(monkeypatch, disks, expected):
    """By folder its disk, and the blocks of 4 KiB that are free there for this user."""

    class Found:
        f_frsize = 4096
        f_bsize = 2**20
        f_bfree = 10**9

        def __init__(self, name):
            self.st_dev, self.f_bavail = disks[name]

    monkeypatch.setattr(os, "stat", Found)
    monkeypatch.setattr(os, "statvfs", Found)
    found = free_bytes([*disks])
    monkeypatch.undo()
    assert found == expected * 4096


def test_the_free_bytes_of_a_real_file_system_are_those_that_it_was_made_with(tmp_path):
    with mounted(tmp_path, "nr_inodes=8"):
        assert free_bytes([str(tmp_path)]) == 2**20
        (tmp_path / "file").write_bytes(bytes(3 * 4096))
        assert free_bytes([str(tmp_path)]) == 2**20 - 3 * 4096
