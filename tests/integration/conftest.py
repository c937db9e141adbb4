"""A store whose clock can be set."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnstream_server.embedded import EmbeddedServer, find_binary

# Moves the clock of a process by the seconds that a file holds; monotonic time goes on as it was.
CLOCK_SHIM = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset_s;

__attribute__((constructor)) static void open_offset(void) {
    int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
    offset_s = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME && offset_s) now->tv_sec += *offset_s;
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    *now = (struct timeval){exact.tv_sec, exact.tv_nsec / 1000};
    return 0;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return result ? (*result = now.tv_sec) : now.tv_sec;
}
"""


class ClockedServer(EmbeddedServer):
    """A store whose clock can be set."""

    def __init__(self, folder: Path, compiler: str) -> None:
        self._offset = folder / "offset"
        self.set_clock(0)
        source, shim, program = (folder / name for name in ("shim.c", "shim.so", "server"))
        source.write_text(CLOCK_SHIM)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, source], check=True)
        start = f'CLOCK_OFFSET_FILE={self._offset} LD_PRELOAD={shim} exec {find_binary()} "$@"'
        program.write_text(f"#!/bin/sh\n{start}\n")
        program.chmod(0o700)
        super().__init__(binary=program)

    def set_clock(self, offset_s: int) -> None:
        """Let it go ahead of the true time by so much."""
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(struct.pack("q", offset_s))


@pytest.fixture
def clocked_server(tmp_path: Path) -> Iterator[ClockedServer]:
    """A store of one's own, whose clock can be set."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the clock is set by a C library for Linux")
    with ClockedServer(tmp_path, compiler) as server:
        yield server
