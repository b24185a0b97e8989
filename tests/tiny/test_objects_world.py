"""The world of shapes: what it asks for, draws and keeps apart."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from glm_grpo.errors import DataError
from glm_grpo.tiny.objects import world
from glm_grpo.tiny.objects.prompts import object_prompts
from rewards.detection import Detection
from rewards.terms.composition_rows import read_composition
from rewards.terms.composition_rule import PUBLISHED, judge

SIZE = {"height": world.SIZE, "width": world.SIZE}


def found_in(shapes):
    """What a perfect detector finds."""
    return [
        Detection(
            each.shape,
            1.0,
            *(each.left * 16.0 + 2, each.top * 16.0 + 2),
            *((each.left + each.side) * 16.0 - 2, (each.top + each.side) * 16.0 - 2),
            colours={each.colour: 1.0},
        )
        for each in shapes
    ]


def is_right(request, shapes):
    composition = read_composition(world.metadata(request))
    return judge(composition, found_in(shapes), PUBLISHED).is_right


def some_requests(count):
    """As many of each kind, if there are."""
    rng = np.random.default_rng(0)
    for held_out in (False, True):
        for requests in world.requests_by_tag(held_out=held_out).values():
            yield from (requests[row] for row in rng.permutation(len(requests))[:count])


def test_arrangements_are_right_by_the_rule_of_genevals_verdict():
    rng = np.random.default_rng(1)
    for request in some_requests(40):
        shapes = world.arrange(request, rng)

        assert is_right(request, shapes), world.caption(request)
        assert len(shapes) == request.number


def test_careless_captions_are_often_wrong_and_name_no_other_classes():
    rng = np.random.default_rng(2)
    wrong = Counter()
    for request in some_requests(40):
        made = world.careless(request, rng, 0.6)
        assert {each.shape for each in made.wanted} <= {each.shape for each in request.wanted}
        wrong[request.tag] += not is_right(request, world.arrange(made, rng))

    assert wrong["single_object"] == 0
    assert min(wrong[tag] for tag in ("counting", "color_attr", "position", "objects")) > 20
    assert all(world.careless(request, rng, 0.0) == request for request in some_requests(5))


def test_held_out_captions_are_not_those_trained_on():
    held_out = object_prompts("objects-heldout", **SIZE)
    trained = object_prompts("objects-train", **SIZE)
    rng = np.random.default_rng(3)
    seen = {world.caption(world.random_request(rng)) for _ in range(5000)}

    assert not {*held_out.captions()} & (seen | {*trained.captions()})
    assert all(map(world.is_caption, seen))
    assert not world.is_caption("a photo of a red cat")
    assert len({*held_out.ids()}) == len(held_out)


def test_prompts_have_a_right_image_as_target():
    prompts = object_prompts("objects-heldout", **SIZE)
    prompt = prompts[next(row for row, tag in enumerate(tags(prompts)) if tag == "colors")]
    colour = world.COLOURS[prompt.metadata["include"][0]["color"]]

    is_shape = (prompt.target != torch.tensor(world.GROUND).view(3, 1, 1)).any(dim=0)
    is_colour = (prompt.target == torch.tensor(colour).view(3, 1, 1)).all(dim=0)
    assert 200 < is_shape.sum() < 2000
    assert is_colour.sum() > 0.7 * is_shape.sum()
    assert {*tags(prompts)} >= {"counting", "position", "color_attr", "two_object", "objects"}


def tags(prompts):
    return [each["tag"] for each in prompts.metadata()]


def test_equal_cells_are_one_cell():
    atlas = world.cell_atlas()
    small = world.scene_cells([world.Shape("square", "red", 2, top=0, left=0)])
    large = world.scene_cells([world.Shape("square", "red", 3, top=0, left=0)])

    assert len({tile.numpy().tobytes() for tile in atlas}) == len(atlas)
    assert small[0, 0] == large[0, 0] != 0
    assert (small == 0).sum() == 64 - 4
    assert torch.equal(world.draw_cells(small)[:, 100, 100], torch.tensor(world.GROUND).byte())


@pytest.mark.parametrize(
    ("size", "sources", "named"),
    [(SIZE, 1, "data.sources"), ({**SIZE, "width": 64}, 0, "128")],
)
def test_sets_of_other_sizes_or_with_sources_are_refused(size, sources, named):
    with pytest.raises(DataError, match=named):
        object_prompts("objects-train", **size, sources=sources)
