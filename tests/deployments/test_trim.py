"""What large bodies took goes back."""

import asyncio
import subprocess
import sys

from deployments.trim import Trim

# In a process of its own, of whose memory nobody else has a part: texts between which something stays.
SCRIPT = """
import asyncio, psutil
from deployments.trim import Trim

def now(): return psutil.Process().memory_info().rss / 2**20

async def main():
    trim, kept = Trim(after_s=0.01), []
    before = now()
    texts = []
    for _ in range(2000):
        texts.append(bytearray(b"x" * 100_000))
        kept.append(bytearray(b"y" * 600))
    texts.clear()
    freed = now()
    trim.freed(8 << 20)
    await trim._due
    print(before, freed, now())

asyncio.run(main())
"""


def test_memory_that_glibc_keeps_goes_back_to_the_machine() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, freed, after = map(float, done.stdout.split())
    assert freed > before + 100.0  # else there was nothing to show
    assert after < before + 50.0


async def test_a_little_is_no_reason_and_much_at_once_is_one() -> None:
    calls: list[int] = []
    trim = Trim(after_s=0.05)
    trim._trim = calls.append
    trim.freed(1 << 20)
    assert trim._due is None
    for _ in range(5):
        trim.freed(32 << 20)
    await asyncio.sleep(0.3)
    assert calls == [0]
    trim.freed(32 << 20)
    await asyncio.sleep(0.3)
    assert calls == [0, 0]
