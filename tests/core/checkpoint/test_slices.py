"""Boxes, against arrays that count elements one by one."""

import doctest
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.checkpoint import directory, slices
from core.checkpoint.slices import (
    flat_boxes,
    flat_span,
    intersect,
    moved,
    relative,
    subtract,
    tiling_problem,
    whole,
)

quick = settings(deadline=None, max_examples=200)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape, empty=True):
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple((a, b if empty else max(b, a + 1)) for a, b in bounds)


@st.composite
def shape_and_boxes(draw, most):
    shape = draw(shapes)
    return shape, draw(st.lists(boxes_in(shape), max_size=most))


@st.composite
def tilings(draw):
    """A shape and boxes that tile it: cut again and again at random, in random order."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    found = [whole(shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        start, stop = box[dim]
        at = draw(st.integers(start, stop))
        cut = [(start, at), (at, stop)]
        found += [(*box[:dim], part, *box[dim + 1 :]) for part in cut if part[0] < part[1]]
    return shape, draw(st.permutations(found))


def counts(shape, boxes):
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[slices.slices(box)] += 1
    return count


@quick
@given(st.data())
def test_a_flat_range_is_its_boxes_in_order(data):
    shape = data.draw(shapes)
    numel = int(np.prod(shape))
    start, stop = sorted((data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel))))
    flat = np.arange(numel).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    parts = [flat[slices.slices(box)].ravel() for box in boxes]
    assert np.array_equal(np.concatenate([np.empty(0, int), *parts]), np.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        first, last = flat_span(shape, box)
        assert last - first == slices.volume(box), "contiguous in memory"


def test_a_flat_range_outside_the_tensor_is_refused():
    with pytest.raises(ValueError, match="elements 3 to 7 are outside a tensor of 6"):
        flat_boxes((2, 3), 3, 7)


@quick
@given(shape_and_boxes(2).filter(lambda drawn: len(drawn[1]) == 2))
def test_intersection_and_difference_count_every_element_once(drawn):
    shape, (a, b) = drawn
    shared, left = intersect(a, b), subtract(a, b)
    both = counts(shape, [a]) & counts(shape, [b])
    assert np.array_equal(counts(shape, [shared] if shared is not None else []), both)
    if slices.volume(a):
        assert np.array_equal(counts(shape, left), counts(shape, [a]) - both)
    if shared is not None:
        assert moved(relative(shared, a), [start for start, _ in a]) == shared


@quick
@given(tilings(), st.data())
def test_a_tiling_is_accepted_and_any_change_of_it_is_not(tiling, data):
    shape, boxes = tiling
    assert tiling_problem(shape, boxes) is None
    chosen = data.draw(st.integers(0, len(boxes) - 1))
    without = boxes[:chosen] + boxes[chosen + 1 :]
    assert "have an owner" in tiling_problem(shape, without)
    assert "overlap" in tiling_problem(shape, [*boxes, boxes[chosen]])


@quick
@given(shape_and_boxes(6))
def test_the_verdict_on_any_boxes_is_that_of_counting(drawn):
    shape, boxes = drawn
    if 0 in shape:
        return  # nothing can be owned; the store asks for no owner
    full = [box for box in boxes if slices.volume(box)]
    tiles = len(full) == len(boxes) and bool((counts(shape, boxes) == 1).all())
    assert (tiling_problem(shape, boxes) is None) == tiles


def test_the_verdict_names_the_elements():
    assert tiling_problem((4, 4), [((0, 4), (0, 3))]) == (
        "12 of 16 elements have an owner; [0:4, 3:4] has none"
    )
    assert tiling_problem((4, 4), [((0, 3), (0, 4)), ((2, 4), (0, 4))]) == (
        "[0:3, 0:4] and [2:4, 0:4] overlap: some elements have two owners"
    )
    assert "outside the shape (4,)" in tiling_problem((4,), [((0, 5),)])
    assert "dimensions of the shape" in tiling_problem((4,), [((0, 4), (0, 1))])


def test_ten_thousand_flat_pieces_are_checked_in_a_moment():
    shape = (5000, 64)
    cuts = [*range(0, 320_000, 33), 320_000]
    boxes = [box for a, b in pairwise(cuts) for box in flat_boxes(shape, a, b)]
    assert len(boxes) > 10_000
    assert tiling_problem(shape, boxes) is None


def test_examples_in_the_docstrings():
    for module in (slices, directory):
        assert doctest.testmod(module).failed == 0
