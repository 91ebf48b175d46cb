"""What all tests share: one thread of arithmetic per process, since several engines share few cores here."""

import os

# Read by torch when it is first imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
