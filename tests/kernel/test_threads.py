"""Worker threads: errors, sharing, overlap, fork."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_kernel import KernelError, MoEWrapper, _ext
from kt_kernel.contexts import shared_context
from tests.kernel.layers import make_input, make_layer, same_bits

LAYER = make_layer(6, 96, 64)
INPUT = make_input(LAYER, 20, 2)


def _count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _make_loaded(threads: int = 2, **options: Any) -> MoEWrapper:
    wrapper = MoEWrapper(LAYER.config(2), backend="INT8", threads=threads, **options)
    wrapper.load_weights(LAYER.weights())
    return wrapper


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_an_exception_in_a_worker_thread_reaches_python_and_the_pool_lives_on(threads: int) -> None:
    wrapper = _make_loaded(threads)
    context = shared_context(threads)
    before = wrapper.forward(*INPUT)
    for _ in range(3):
        with pytest.raises(KernelError, match="the worker fell over"):
            context.run_failing_job("the worker fell over")
    assert same_bits(wrapper.forward(*INPUT), before)


def test_wrappers_with_the_same_number_of_threads_share_a_pool() -> None:
    first, second = _make_loaded(3), _make_loaded(3)
    assert shared_context(3) is shared_context(3)
    assert first._moe is not second._moe
    assert shared_context(3).threads == 3


def test_a_pool_goes_with_its_last_wrapper() -> None:
    wrapper = _make_loaded(6)
    running = _count_threads()
    del wrapper
    assert _count_threads() < running


def test_more_threads_than_cores_are_honoured_and_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    many = _ext.topology().default_threads + 3
    with caplog.at_level(logging.WARNING, "kt_kernel"):
        assert [_make_loaded(many).threads for _ in range(2)] == [many, many]
    assert len(caplog.messages) == 1
    assert f"{many} threads asked for" in caplog.messages[0]


def test_submitted_forwards_give_the_bits_of_forward_in_any_order_of_waiting() -> None:
    wrapper = _make_loaded()
    inputs = [make_input(LAYER, tokens, 2, seed=tokens) for tokens in (1, 30, 7, 64, 2)]
    expected = [wrapper.forward(*arguments) for arguments in inputs]
    pending = [wrapper.submit(*arguments) for arguments in inputs]
    for index in (4, 0, 3, 1, 2):
        assert same_bits(pending[index].result(), expected[index])
        assert pending[index].done()
        assert same_bits(pending[index].result(), expected[index])


def test_submitted_arrays_live_until_the_result_is_there() -> None:
    wrapper = _make_loaded()
    x, ids, weights = make_input(LAYER, 64, 2)
    expected = wrapper.forward(x, ids, weights)
    # Views of another layout are copied by the wrapper; nobody but the pending call holds the copies.
    pending = [wrapper.submit(np.asfortranarray(x), ids.astype(np.int32), weights.copy()) for _ in range(8)]
    assert all(same_bits(call.result(), expected) for call in pending)


def test_an_abandoned_submission_does_no_harm() -> None:
    wrapper = _make_loaded()
    expected = wrapper.forward(*INPUT)
    for _ in range(20):
        wrapper.submit(*INPUT)
    assert same_bits(wrapper.forward(*INPUT), expected)
    pending = wrapper.submit(*INPUT)
    del wrapper
    assert same_bits(pending.result(), expected)


def test_python_threads_may_call_one_wrapper_at_once() -> None:
    wrappers = [_make_loaded(), _make_loaded()]
    expected = wrappers[0].forward(*INPUT)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(25):
            if not same_bits(wrappers[number % 2].forward(*INPUT), expected):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_a_deep_copy_shares_the_packed_weights() -> None:
    wrapper = _make_loaded()
    twin = copy.deepcopy(wrapper)
    assert twin is not wrapper
    assert twin._packed is wrapper._packed
    assert same_bits(twin.forward(*INPUT), wrapper.forward(*INPUT))


def test_warm_up_changes_no_result() -> None:
    wrapper = _make_loaded()
    expected = wrapper.forward(*INPUT)
    wrapper.warm_up()
    assert same_bits(wrapper.forward(*INPUT), expected)


_FORK = """
import os, sys
import numpy as np
from kt_kernel import MoEWrapper
from tests.kernel.layers import make_input, make_layer, same_bits

layer = make_layer(6, 96, 64)
arguments = make_input(layer, 40, 2)
moe = MoEWrapper(layer.config(2), backend="INT8", threads=3)
moe.load_weights(layer.weights())
expected = moe.forward(*arguments)
moe.submit(*arguments).result()
child = os.fork()
if child == 0:
    ok = same_bits(moe.forward(*arguments), expected)
    ok = ok and same_bits(moe.submit(*arguments).result(), expected)
    fresh = MoEWrapper(layer.config(2), backend="INT8", threads=3)
    fresh.load_weights(layer.weights())
    ok = ok and same_bits(fresh.forward(*arguments), expected)
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert same_bits(moe.forward(*arguments), expected), "the parent lost its threads"
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_computes_the_same_and_the_parent_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


_OLDER_THREAD = """
import os, queue, threading
import numpy as np

jobs, answers = queue.Queue(), queue.Queue()
def serve():
    for job in iter(jobs.get, None):
        answers.put(job())
older = threading.Thread(target=serve, daemon=True)
older.start()  # before the kernel is loaded and asks for the tiles

import kt_kernel
moe = kt_kernel.AMXMoEWrapper(
    dict(expert_num=2, hidden_size=96, intermediate_size=64, max_len=64, num_experts_per_tok=2), threads=2
)
random = np.random.default_rng(0)
shapes = {"gate_proj": (2, 64, 96), "up_proj": (2, 64, 96), "down_proj": (2, 96, 64)}
moe.load_weights({name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})
x = random.standard_normal((40, 96)).astype(np.float32)
ids, weights = np.tile([0, 1], (40, 1)), np.ones((40, 2), np.float32)
def forward():
    return moe.forward(x, ids, weights).tobytes()

expected = forward()
def in_thread(started_now):
    if started_now:
        thread = threading.Thread(target=lambda: answers.put(forward()))
        thread.start()
        thread.join()
    else:
        jobs.put(forward)
    return answers.get(timeout=30) == expected

assert in_thread(False) and in_thread(True)
child = os.fork()
if child == 0:
    os._exit(0 if forward() == expected and in_thread(True) else 1)
assert os.waitpid(child, 0)[1] == 0
assert in_thread(False) and in_thread(True) and forward() == expected
print("same bits")
"""


def test_threads_older_and_younger_than_the_tile_permission_and_a_fork_between_give_the_same_bits() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _OLDER_THREAD]  # Python warns of forks in a process with threads
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "same bits\n", done.stderr
