"""Network file systems are recognised by the longest mount point above a folder."""

from pathlib import Path

import pytest

from pipeline.file_system import network_file_system

MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/me/local xfs rw 0 0
//host/share /mnt/with\\040space cifs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/data", None),
        ("/home", "nfs4"),
        ("/home/me/data/pong", "nfs4"),
        ("/home/me/local/data", None),
        ("/homes/data", None),
        ("/mnt/with space/data", "cifs"),
    ],
)
def test_the_longest_mount_point_decides(folder, kind):
    assert network_file_system(Path(folder), MOUNTS) == kind


def test_this_machine_can_be_asked(tmp_path):
    assert network_file_system(tmp_path / "not yet there") is None
