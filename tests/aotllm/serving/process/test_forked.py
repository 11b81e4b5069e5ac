"""`ForkedProcess`, each in a process of its own that has one thread."""

from __future__ import annotations

import subprocess
import sys

PRELUDE = """
import asyncio, os, signal, sys
from pathlib import Path
from aotllm.serving.process.forked import ForkedProcess

def comm(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + program], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_child_runs_a_loop_of_its_own_and_tells_its_exit_code():
    ran = run("""
async def child():
    await asyncio.sleep(0)
    return 7

def main():
    assert sys.stdin.read() == ""
    assert os.getsid(0) == os.getpid()
    return asyncio.run(child())

async def parent():
    children = [await ForkedProcess.start(f"child-{number}", main) for number in range(3)]
    assert all(child.pid != os.getpid() for child in children)
    assert [await child.wait() for child in children] == [7] * 3
    assert [child.returncode for child in children] == [7] * 3
    assert await asyncio.wait_for(children[0].wait(), 1) == 7
    children[0].kill()  # has ended: harmless

asyncio.run(parent())
print("parent ends")
""")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "parent ends\n", "")


def test_a_child_has_a_name_ignores_ctrl_c_and_is_ended_by_signals_that_its_parent_does_not_see():
    ran = run("""
read, write = os.pipe()

def main():
    os.kill(os.getpid(), signal.SIGINT)
    os.write(write, b"x")
    signal.pause()
    return 0

async def parent():
    seen = []
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, seen.append, number)
    child = await ForkedProcess.start("aotllm-child", main)
    assert await asyncio.to_thread(os.read, read, 1) == b"x"
    assert comm(child.pid) == "aotllm-child"
    child.send_signal(signal.SIGTERM)
    assert await child.wait() == -signal.SIGTERM
    assert seen == []
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.01)
    assert seen == [signal.SIGTERM]

asyncio.run(parent())
""")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_child_that_raises_has_exit_code_1_and_ends_nothing_of_its_parents():
    ran = run("""
import atexit

def main():
    raise ValueError("of the child")

async def parent():
    try:
        child = await ForkedProcess.start("child", main)
        assert await child.wait() == 1
    finally:
        print("parent cleans up")

atexit.register(print, "parent ends")
asyncio.run(parent())
""")
    assert (ran.returncode, ran.stdout) == (0, "parent cleans up\nparent ends\n")
    assert ran.stderr.endswith("ValueError: of the child\n")
