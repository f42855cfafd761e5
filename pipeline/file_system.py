"""What kind of file system a folder lies on: network ones break the promises that a local dataset relies on."""

from pathlib import Path

# No dependable rename, locks or memory maps between hosts.
NETWORK_KINDS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "sshfs", "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "gcsfuse", "9p",
     "glusterfs", "fuse.glusterfs", "lustre", "ceph", "fuse.ceph", "beegfs", "gpfs", "afs", "webdav", "davfs")
)  # fmt: skip
MOUNTS = Path("/proc/self/mounts")


def network_file_system(folder: Path, mounts: str | None = None) -> str | None:
    """The kind of the network file system that holds ``folder`` (or will: it need not exist), None on a local disk.

    ``mounts`` is the text of the kernel's table, read from /proc where there is one; elsewhere nothing is known.
    """
    if mounts is None:
        if not MOUNTS.exists():
            return None
        mounts = MOUNTS.read_text()
    folder = folder.absolute()
    best: tuple[int, str] = (-1, "")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        point = Path(point.encode().decode("unicode_escape"))  # Spaces stand there as \040.
        if folder == point or point in folder.parents:
            best = max(best, (len(point.parts), kind))
    return best[1] if best[1] in NETWORK_KINDS else None
