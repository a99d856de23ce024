"""When passes go on with one thread: beside others on the same cores or without other threads, and only there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.kernels.build import COMPILERS
from outpace.kernels.levels import SOURCES
from tests.unit.models.tiny import needs_kernels

pytestmark = needs_kernels
PROGRAM = """
#include "pool.h"
#include <cstdio>

// Passes of `waited` out of 100 by each thread but one, alone or with all.
static int together(Crowd& crowd, int passes, int waited, int size = 2) {
  int found = 0;
  for (int pass = 0; pass < passes; ++pass)
    if (crowd.take(size) == size) ++found, crowd.learn(size, 100, waited * (size - 1));
  return found;
}

int main() {
  Crowd quiet, once, busy, many, held;
  std::printf("%d ", together(quiet, 100, 20));
  std::printf("%d ", together(once, 2, 90) + together(once, 2, 5) + together(once, 2, 90) + together(once, 94, 5));
  std::printf("%d ", together(busy, 1000, 60));  // three, then one try behind 16, 32, 64, 128, 256 ... passes alone
  std::printf("%d %d ", together(many, 100, 20, 8), together(held, 3 + 16, 60, 8));
  int freed = 0;
  while (busy.take(2) == 1) ++freed;
  std::printf("%d ", freed <= 256 && together(busy, 100, 5) == 100);
  const int64_t start = nanoseconds();
  for (int turn = 0; turn < kSpinsInPass; ++turn) pause_briefly();
  std::printf("%d", nanoseconds() - start > 4000);
}
"""


def printed_by(program: str, folder: Path) -> list[str]:
    """The words that a program prints."""
    source, built = folder / "program.cpp", folder / "program"
    source.write_text(program)
    compiler = next(found for name in COMPILERS if (found := shutil.which(name)))
    command = [compiler, "-std=c++17", "-O1", "-w", "-pthread", f"-I{SOURCES}", str(source), "-o", str(built)]
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run([built], check=True, capture_output=True, text=True).stdout.split()


def test_passes_go_alone_in_a_crowd(tmp_path: Path) -> None:
    """Guards against threads that wait for one that was put aside, at every meeting of every pass; against one that
    gives up after a single slow pass, or for the short waits of many threads; against one that never tries again; and
    against pauses of no time, with which the wait for a piece of a product is one for a thread put aside."""
    assert printed_by(PROGRAM, tmp_path) == ["100", "100", "9", "100", "3", "1", "1"]


REFUSED = """
#include "pool.h"
#include <cstdio>
#include <sys/resource.h>

int main() {
  Pool& pool = *new Pool;  // as in kernels.cpp: its threads never end
  const auto size_of = [&](int size) {
    int found = 0;
    pool.run(size, [&](Team& team) { found = team.size; });
    return found;
  };
  std::printf("%d ", size_of(3));
  const rlimit none = {1 << 20, 1 << 20};  // too little for another stack
  setrlimit(RLIMIT_AS, &none);
  std::printf("%d %d", size_of(64), size_of(3));
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux refuses threads by this limit")
def test_a_pass_that_gets_no_threads_runs_alone(tmp_path: Path) -> None:
    """Guards against a process that ends where a container limits its threads: an exception leaves the kernels."""
    assert printed_by(REFUSED, tmp_path) == ["3", "1", "3"]


SHARED = """
#include "attention.h"
#include <cstdio>

// Whether spans of these contexts are shared out, for a row behind each, 12 heads and 2 key heads.
static bool are_split(const std::vector<int>& contexts, int threads) {
  std::vector<Part> parts(contexts.size());
  for (size_t part = 0; part < parts.size(); ++part) parts[part].count = 1, parts[part].committed = contexts[part];
  return Tasks(parts.data(), int(parts.size()), 12, 2, 128, threads).are_split;
}

int main() {
  std::vector<int> alike(8, 32000), unlike(8, 300);
  unlike[3] = 32000;
  std::printf("%d %d %d %d", are_split({32000}, 4), are_split(alike, 4), are_split(unlike, 2), are_split(unlike, 4));
}
"""


def test_a_long_context_beside_short_ones_is_shared_out(tmp_path: Path) -> None:
    """Guards against a request of 32,000 tokens in a batch of eight whose two key heads keep two of four threads busy:
    the other two wait for them, and as that looks like a busy machine, the next passes have one thread."""
    assert printed_by(SHARED, tmp_path) == ["1", "0", "0", "1"]
