"""Large imports with the garbage collector paused."""

from __future__ import annotations

import gc

from smtrain.core.extras import pause_collector


def test_what_was_imported_is_not_looked_through_by_the_next_collection() -> None:
    gc.unfreeze()  # frozen by another test, or by Python 3.12 itself
    with pause_collector():
        assert not gc.isenabled()
        many = [[number] for number in range(50_000)]
    assert gc.isenabled()
    young = {id(each) for age in (0, 1) for each in gc.get_objects(generation=age)}
    assert not young & {id(each) for each in many}


def test_what_was_garbage_by_then_is_still_collected() -> None:
    class Node:
        alive = 0

        def __init__(self) -> None:
            self.me = self
            Node.alive += 1

        def __del__(self) -> None:
            Node.alive -= 1

    with pause_collector():
        Node()
    assert Node.alive == 1
    gc.collect()
    assert Node.alive == 0


def test_what_a_program_froze_stays_frozen_and_a_pause_of_its_own_goes_on() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with pause_collector():
            pass
        # Some of them may be freed meanwhile; without the freeze there would be 0.
        assert frozen * 0.9 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
    gc.disable()
    try:
        with pause_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
