"""Processes to whom a file system refuses what some file systems cannot do."""

import os
import subprocess
from pathlib import Path

_FLOCK = "int flock(int f, int o) { errno = ENOSYS; return -1; }\n"
# As folders on AFS, CIFS and FUSE; as old containers; as FUSE.
_MORE = """
int fsync(int f) {
  struct stat s;
  if (!fstat(f, &s) && S_ISDIR(s.st_mode)) { errno = EINVAL; return -1; }
  return syscall(SYS_fsync, f);
}
ssize_t copy_file_range(int f, off64_t *i, int t, off64_t *o, size_t n, unsigned flags) {
  errno = EPERM;
  return -1;
}
ssize_t sendfile(int t, int f, off_t *o, size_t n) { errno = EINVAL; return -1; }
ssize_t sendfile64(int t, int f, off64_t *o, size_t n) { errno = EINVAL; return -1; }
int posix_fadvise(int f, off_t o, off_t n, int a) { return EINVAL; }
int posix_fadvise64(int f, off64_t o, off64_t n, int a) { return EINVAL; }
"""
_HEAD = """#define _GNU_SOURCE
#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
"""


def no_flock(folder: Path, more: bool = False) -> dict[str, str]:
    """An environment for processes to whom flock answers ENOSYS, as on Lustre without `-o flock`.

    Args:
        folder: Folder in which it is made.
        more: Whether to refuse also flushes of folders, copies in the kernel, and hints.
    """
    source, library = folder / "no_flock.c", folder / "no_flock.so"
    source.write_text(_HEAD + _FLOCK + _MORE * more)
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    before = os.environ.get("LD_PRELOAD", "")  # sanitizers, which must come first
    return {**os.environ, "LD_PRELOAD": f"{before} {library}".strip()}
