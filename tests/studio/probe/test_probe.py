"""The probe on the embedded model, small enough for a test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm_grpo.commands.probe import probe_config, probed_batches
from glm_grpo.config import compose_config
from glm_grpo.data.prompts import part_of_batch
from glm_grpo.errors import ConfigError
from glm_grpo.setup.prepared_run import prepare
from glm_grpo.studio.probe.figures import equal_weights, report_decode, report_probe
from glm_grpo.studio.probe.gradient import GradientProbe
from glm_grpo.studio.probe.probe import (
    FullDecode,
    ProbeSamples,
    join_decodes,
    sample_probe,
)
from glm_grpo.training.batches import build_batch
from glm_grpo.types import Experience, ImageBatch
from rewards.terms.ssim import SsimReward
from rewards.types import Prompt, RewardTable
from rewards.weighting import combine
from tests.opened import prompts_of
from tests.studio.probe.reports import NAN, make_term

CONFIG_DIR = Path(__file__).parents[3] / "configs"
PROMPTS, GROUP, NOISES = 3, 3, 2


@pytest.fixture(scope="module")
def probed():
    """Stage, batch and settings of a probe."""
    config = compose_config(
        CONFIG_DIR,
        "tiny",
        [
            f"rollout.prompts_per_step={PROMPTS}",
            f"rollout.group_size={GROUP}",
            "train.micro_batch_size=3",
            "reward.terms.lpips=null",
            "reward.terms.aesthetic=null",
            "reward.terms.ocr=null",
            "+reward.terms.psnr={kind: psnr, weight: 0.1}",
        ],
    )
    models = prepare(config).load()
    batch = build_batch(config, prepare(config).prompts.training, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glm_grpo.models.glm_image.token_grid._PREVIEW_SIDE", 2)
        yield models, batch, config


@pytest.fixture(scope="module")
def samples(probed):
    models, batch, config = probed
    return sample_probe(models, [batch], config, noises=NOISES)


def test_draw_probe_scores_samples_noises_and_reconstruction(samples):
    assert samples.images.pixels.shape == (PROMPTS, GROUP, 3, 128, 128)
    assert samples.scores.names == ("ssim", "psnr")
    assert samples.redrawn.shape == (PROMPTS, NOISES, 2)
    assert samples.reconstruction.shape == (PROMPTS, 2)
    # SSIM and PSNR of a target with itself.
    assert torch.equal(samples.target, torch.ones(PROMPTS, 2))
    assert samples.reconstructed_pixels.shape == (PROMPTS, 3, 128, 128)


class Recorder(GradientProbe):
    """Keeps the experiences that it is given."""

    credit = "place"

    def __init__(self) -> None:
        self.given: list[Experience] = []

    def add(self, experience: Experience) -> None:
        self.given.append(experience)


def test_gradients_are_computed_of_the_samples_of_whole_batches(probed, samples):
    models, batch, config = probed
    gradient = Recorder()
    batches = [batch, part_of_batch(batch, range(1))]

    found = sample_probe(models, batches, config, noises=NOISES, gradient=gradient)

    assert len(found.prompts) == PROMPTS + 1
    (experience,) = gradient.given
    assert torch.equal(experience.scores.raw, samples.scores.raw)
    assert {*experience.scores.score_map} == {"ssim", "psnr"}
    assert experience.place_credit is not None
    # Nothing else reads them, and tables of one image are made from this one.
    assert not found.scores.score_map


def test_an_interrupted_probe_reports_on_the_prompts_done(probed, samples, monkeypatch):
    models, batch, config = probed
    done = iter([samples])

    def interrupted(*_):
        if (part := next(done, None)) is None:
            raise KeyboardInterrupt
        return part

    monkeypatch.setattr("glm_grpo.studio.probe.probe._probe_batch", interrupted)
    assert sample_probe(models, [batch] * 2, config, noises=NOISES).prompts == samples.prompts
    with pytest.raises(KeyboardInterrupt):
        sample_probe(models, [batch], config, noises=NOISES)


@pytest.mark.parametrize(
    ("asked", "sizes"), [(1, [1]), (6, [3, 3]), (7, [3, 3, 1]), (10**9, [3, 3, 1])]
)
def test_probe_samples_as_many_prompts_as_asked_or_all_there_are(tmp_path, caplog, asked, sizes):
    caplog.set_level("INFO", logger="glm_grpo")
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f'a sign that says "{word}"\n' for word in "ABCDEFG"))
    overrides = [f"data.path={path}", f"rollout.prompts_per_step={PROMPTS}", "rollout.group_size=2"]
    config = compose_config(CONFIG_DIR, "tiny", [*overrides, "train.micro_batch_size=6"])
    prompts = prompts_of(config).training
    batches = probed_batches(config, prompts, asked)
    assert [len(batch.prompts) for batch in batches] == sizes
    whole = build_batch(config, prompts, 1)
    assert batches[0].decode_seeds == whole.decode_seeds[: sizes[0]]
    told = ["--prompts 1000000000: there are only 7, so all are sampled"] if asked > 7 else []
    assert caplog.messages == told


def test_draw_probe_decodes_the_targets_reconstruction(samples):
    similarity = SsimReward(torch.device("cpu")).score(
        samples.prompts, samples.reconstructed_pixels
    )

    torch.testing.assert_close(samples.reconstruction[:, 0], similarity)
    # What the decoder makes of the right tokens is nearly the target; samples of the base
    # policy are not.
    assert similarity.min() > 0.9
    assert samples.reconstruction[:, 0].mean() > samples.scores.raw[..., 0].mean()


def test_draw_probe_redraws_one_samples_tokens_under_other_noises(samples):
    spread = samples.redrawn[..., 0].amax(dim=1) - samples.redrawn[..., 0].amin(dim=1)
    distance = (samples.redrawn[..., 0] - samples.scores.raw[:, :1, 0]).abs()

    # Another noise gives another image, and the same tokens give nearly the same score.
    assert (spread > 0).all()
    assert distance.max() < 0.1


def test_draw_probe_decodes_cheap_rollouts_once_more_in_full(probed, samples):
    models, batch, config = probed
    decode = config.decode.model_copy(update={"rollout_steps": 1})
    config = config.model_copy(update={"decode": decode})
    cheap = sample_probe(models, [batch], config, noises=NOISES)

    assert samples.full is None
    assert (cheap.full.cheap_steps, cheap.full.steps, cheap.full.timed_images) == (1, 4, GROUP)
    assert torch.equal(cheap.full.scores.raw, samples.scores.raw)
    # The samples, their noises and the targets' own tokens are drawn as rollouts are.
    for name in ("redrawn", "reconstruction"):
        difference = (getattr(cheap, name) - getattr(samples, name))[..., 0].abs()
        assert 0 < difference.nan_to_num().max() < 0.1
    report = report_probe(cheap, config)
    assert len(report.decode.rank_correlations) == len(samples.scores.names)
    assert min(report.decode.images_per_second, report.decode.full_images_per_second) > 0


def make_table(*groups: list[float]) -> RewardTable:
    """Groups of three images, scored by `ssim` and, the other way round, by `lpips`."""
    scores = torch.tensor(groups)
    return RewardTable(
        names=("ssim", "lpips"),
        raw=torch.stack([scores, -scores], dim=-1),
        is_applicable=torch.ones(len(groups), 2, dtype=torch.bool),
        weights=torch.tensor([3.0, 1.0]),
        std_floors=torch.tensor([1e-4, 1e-4]),
    )


FULL = FullDecode(
    scores=make_table([1.0, 2.0, 3.0]),
    steps=4,
    cheap_steps=1,
    timed_images=3,
    seconds=0.5,
    cheap_seconds=0.25,
)


def test_report_decode_correlates_each_term_and_divides_images_by_seconds() -> None:
    cheap = make_table([1.0, 3.0, 2.0])
    # One pair of neighbours swapped: 1 - 6 * 2 / (3 * 8).
    decode = report_decode(FULL, cheap, mode="weighted_sum")
    assert decode.rank_correlations == pytest.approx((0.5, 0.5))
    assert decode.total_rank_correlation == pytest.approx(0.5)
    assert (decode.steps, decode.full_steps) == (1, 4)
    assert (decode.images_per_second, decode.full_images_per_second) == (12.0, 6.0)


def test_equal_weights_give_all_terms_one_spread_and_are_as_large_as_those_given() -> None:
    # Std inside groups, and the fraction of zero-std groups; the last is only watched.
    spreads = [(0.5, 0.0), (0.125, 0.5), (1e-9, 1.0), (NAN, NAN), (1.0, 0.0)]
    audits = [make_term(std_within=std, zero_std_fraction=zero).audit for std, zero in spreads]
    weights = torch.tensor([0.3, -0.3, 0.2, 0.2, 0.0])
    found = equal_weights(audits, weights, mode="weighted_sum")
    # 1 / std is 2 and 8: a fifth and four fifths of 1.
    expected = torch.tensor([0.2, -0.8, NAN, NAN, NAN])
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert equal_weights(audits, weights, mode="normalize_then_sum").isnan().all()
    assert equal_weights(audits[2:3], weights[2:3], mode="weighted_sum").isnan().all()


@pytest.mark.parametrize(
    ("redrawn", "fraction", "verdict"),
    # In stds of the groups, the first term varies by 0 and 1 / sqrt(2), variance 1/4; and both
    # terms vary as in the group.
    [
        ([[0.0, 5.0], [1.0, 5.0]], 0.0625, "can move it"),
        ([[0.0, 0.0], [2.0, 200.0]], 1.0, "cannot: noise"),
    ],
)
def test_a_total_of_standardised_terms_has_their_noise(
    redrawn: list[list[float]], fraction: float, verdict: str
) -> None:
    # Standardised, each term is -+1 / sqrt(2): totals -+sqrt(2), variance 4.
    table = replace(
        make_table([0.0]), raw=torch.tensor([[[0.0, 0.0], [2.0, 200.0]]]), weights=torch.ones(2)
    )
    pixels, undefined = torch.zeros(1, 2, 3, 1, 1, dtype=torch.uint8), torch.full((1, 2), NAN)
    samples = ProbeSamples(
        prompts=(Prompt("0", "a sign"),),
        images=ImageBatch(pixels=pixels, decode_seeds=(0,)),
        scores=table,
        totals=combine(table, mode="normalize_then_sum"),
        redrawn=torch.tensor([redrawn]),
        target=undefined,
        reconstruction=undefined,
        reconstructed_pixels=pixels[:, 0],
        copies=undefined,
        full=None,
    )
    config = compose_config(CONFIG_DIR, "tiny", ["reward.combine=normalize_then_sum"])
    report = report_probe(samples, config)
    assert report.total_noise_fraction == pytest.approx(fraction)
    assert report.verdict.short() == verdict


def test_join_decodes_puts_prompts_after_prompts_and_adds_up_what_was_timed() -> None:
    other = replace(
        FULL, scores=make_table([7.0, 8.0, 9.0], [4.0, 5.0, 6.0]), seconds=1.0, cheap_seconds=0.5
    )
    joined = join_decodes([FULL, other])
    assert joined.scores.raw[..., 0].tolist() == [[1, 2, 3], [7, 8, 9], [4, 5, 6]]
    assert (joined.timed_images, joined.seconds, joined.cheap_seconds) == (6, 1.5, 0.75)
    assert (joined.steps, joined.cheap_steps) == (4, 1)


_CHANCE = torch.Generator().manual_seed(1)


def chance(prompts, images):
    """A judge that does not look."""
    del images
    return torch.rand(len(prompts), generator=_CHANCE)


def test_a_refused_probe_does_not_announce_that_it_replaces_another(tmp_path, caplog):
    (tmp_path / "index.html").touch()
    config = compose_config(CONFIG_DIR, "tiny", [f"model.path={tmp_path / 'none'}"])
    with pytest.raises(ConfigError, match="model.path"):
        probe_config(config, num_prompts=8, noises=4, weights=None, directory=tmp_path)
    assert "replaces" not in caplog.text


def test_a_reward_of_chance_is_found_by_scoring_again_and_by_its_gradient(tmp_path, caplog):
    overrides = [
        *("rollout.prompts_per_step=2", "rollout.group_size=4", "train.micro_batch_size=8"),
        "reward.terms.composition=null",
        f"+reward.terms.chance={{kind: custom, function: '{__file__}:chance', weight: 1}}",
    ]
    config = compose_config(CONFIG_DIR, "tiny_objects", overrides)
    (tmp_path / "index.html").touch()
    # Four batches, by a decoder of one pass: whatever changes is the scorer's doing.
    report = probe_config(config, num_prompts=8, noises=4, weights=(), directory=tmp_path).report
    assert f"{tmp_path} holds a probe, which this one replaces" in caplog.text
    (term,) = report.terms
    assert term.noise_fraction == pytest.approx(report.total_noise_fraction)
    # Its expected value is 1.
    assert 0.4 < term.noise_fraction < 2.5
    assert term.verdict.short() == "cannot: noise"
    assert report.verdict.short() == "cannot: noise"
    # No score has places, which nobody knew before.
    assert (report.gradient.by_place, report.gradient.batches) == ({}, 4)
    assert "agree no better than by chance" in (tmp_path / "index.html").read_text()
