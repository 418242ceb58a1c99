"""Simulated nodes with pynvml in front of them."""

from __future__ import annotations

import contextlib

import pynvml
import pytest

from dra.sim.node import SimulatedNode


def put_under_pynvml(library) -> None:
    """Make pynvml forget the library it had and use this one."""
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml._nvmlLib_refcount = 0


@pytest.fixture
def node(tmp_path):
    """Make nodes by profile name; pynvml is left as it was found."""
    made = []

    def make(profile="dgx-h100", *, initialise=True, **options):
        made_node = SimulatedNode(profile, tmp_path / f"node{len(made)}", **options)
        put_under_pynvml(made_node.library())
        if initialise:
            pynvml.nvmlInit()
        made.append(made_node)
        return made_node

    yield make
    for made_node in made:
        made_node.control.clear()
        with contextlib.suppress(OSError):
            library = made_node.library()
            while library.is_initialised:
                library.finish()
    put_under_pynvml(None)


@pytest.fixture
def use_library():
    """Give the function that puts another library under pynvml."""
    return put_under_pynvml
