import gc
import threading
import time

from dit_pipelining.runtime.threads import Threads


def test_a_thread_is_used_again_once_its_function_has_ended() -> None:
    threads, names = Threads(), []
    for _ in range(3):
        assert threads.start(lambda: names.append(threading.get_ident())).wait(10)
    assert len(set(names)) == 1


def test_functions_run_side_by_side() -> None:
    threads, meeting = Threads(), threading.Barrier(3, timeout=10)
    ended = [threads.start(lambda: meeting.wait() and None) for _ in range(3)]
    assert all(event.wait(10) for event in ended)


def test_threads_end_with_their_owner() -> None:
    threads, found = Threads(), []
    assert threads.start(lambda: found.append(threading.current_thread())).wait(10)
    del threads
    gc.collect()
    found[0].join(10)
    assert not found[0].is_alive()


def test_a_function_that_has_ended_is_let_go() -> None:
    threads = Threads()

    class Held:
        pass

    held = Held()
    count = len(gc.get_referrers(held))
    assert threads.start(lambda held=held: None).wait(10)
    deadline = time.monotonic() + 10
    while len(gc.get_referrers(held)) > count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(gc.get_referrers(held)) == count
