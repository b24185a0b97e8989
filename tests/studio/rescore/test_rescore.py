"""Runs are stored as training stores them: totals, advantages and tables by its own functions."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch import Tensor

from glm_grpo.cli import main
from glm_grpo.config import Config, compose_config, to_yaml
from glm_grpo.errors import ConfigError, StorageError
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.run.folder import RunFolder, write_atomically
from glm_grpo.run.tables import read_table
from glm_grpo.run.writing import encode, write_rollout
from glm_grpo.studio.rescore.rescore import rescore
from glm_grpo.types import Experience, ImageBatch, PromptBatch, Rollout
from rewards.types import Prompt, RewardTable
from rewards.weighting import combine, is_zero_std

PROMPT = "[red]a sign[/red] that says CAT"


def make_config(configs_dir: Path, *overrides: str, prompts: int, images: int) -> Config:
    sizes = [f"rollout.prompts_per_step={prompts}", f"rollout.group_size={images}"]
    sizes.append(f"train.micro_batch_size={prompts * images}")
    return compose_config(configs_dir, "tiny", [*sizes, *overrides])


def make_table(config: Config, raw: Tensor, is_applicable: Tensor) -> RewardTable:
    terms = config.reward.terms
    return RewardTable(
        names=tuple(terms),
        raw=raw,
        is_applicable=is_applicable,
        weights=torch.tensor([term.weight for term in terms.values()]),
        std_floors=torch.tensor([term.std_floor for term in terms.values()]),
    )


def make_experience(
    config: Config, raw: Tensor, is_applicable: Tensor, penalties: Tensor
) -> Experience:
    """One step, as `glm_grpo.training.collect` makes it of raw scores."""
    count, size, _ = raw.shape
    table = make_table(config, raw, is_applicable)
    totals = combine(table, mode=config.reward.combine)
    prompts = tuple(Prompt(f"p{index}", PROMPT) for index in range(count))
    # Image s of every prompt is grey of brightness 40 s.
    greys = (40 * torch.arange(size)).to(torch.uint8).reshape(1, size, 1, 1, 1)
    seeds = tuple(range(count))
    return Experience(
        prompts=PromptBatch(prompts, size, 32, 32, seed=0, decode_seeds=seeds),
        rollout=Rollout(
            token_ids=torch.zeros(count, size, 2, dtype=torch.int64),
            log_probs=torch.zeros(count, size, 2),
            sampling_mask=None,
        ),
        images=ImageBatch(greys.expand(count, size, 3, 32, 32).contiguous(), seeds),
        scores=table,
        totals=totals,
        penalties=penalties,
        advantages=group_advantages(
            totals - penalties,
            normalization=config.advantage.normalization,
            std_floor=config.advantage.std_floor,
            clip=config.advantage.clip,
        )[..., None],
    )


def store_run(path: Path, config: Config, *steps: Experience) -> RunFolder:
    folder = RunFolder(path)
    write_atomically(folder.config_path, to_yaml(config).encode())
    for step, experience in enumerate(steps, start=1):
        png_files = encode(experience.images)
        write_rollout(folder, experience, png_files, step, combine=config.reward.combine)
    return folder


def random_steps(config: Config, count: int, seed: int) -> list[Experience]:
    """Steps of random scores, with masks, ties, a zero-std group and penalties."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.rollout.prompts_per_step, config.rollout.group_size, 4)
    steps = []
    for _ in range(count):
        raw = torch.rand(shape, generator=generator)
        raw[0] = raw[0, :1]
        raw[1, :2] = raw[1, 2:3]
        is_applicable = torch.rand(shape[0], 4, generator=generator) < 0.7
        is_applicable[:, 3] = True
        raw = raw * is_applicable[:, None, :]
        penalties = 0.1 * torch.randn(shape[:2], generator=generator)
        steps.append(make_experience(config, raw, is_applicable, penalties))
    return steps


@pytest.fixture
def small_run(tmp_path: Path, configs_dir: Path) -> RunFolder:
    """One step of two prompts with three images; ocr (0.3) and aesthetic (0.1) alone differ.

    Totals less what the group shares: p0 has 0.3 * (1, 0.5, 0) + 0.1 * (0, 1, 1), that is
    (0.3, 0.25, 0.1); p1 has 0.3 * (0, 0, 1) + 0.1 * (0, 1, 1), that is (0, 0.1, 0.4).
    """
    advantage = ("advantage.normalization=mean_only", "advantage.clip=null")
    config = make_config(configs_dir, *advantage, prompts=2, images=3)
    raw = torch.full((2, 3, 4), 0.5)
    raw[:, :, 2] = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.0, 1.0]])
    raw[:, :, 3] = torch.tensor([0.0, 1.0, 1.0])
    step = make_experience(config, raw, torch.ones(2, 4, dtype=torch.bool), torch.zeros(2, 3))
    return store_run(tmp_path / "run", config, step)


def edit_table(folder: RunFolder, step: int, column: str, row: int, value: float) -> None:
    path = folder.rollout_path(step)
    table = read_table(path)
    values = table[column].to_pylist()
    values[row] = value
    index = table.schema.get_field_index(column)
    edited = table.set_column(index, column, pyarrow.array(values, pyarrow.float32()))
    pyarrow.parquet.write_table(edited, path)


@pytest.mark.parametrize(
    ("combination", "normalization"),
    [
        ("weighted_sum", "group_std"),
        ("normalize_then_sum", "mean_only"),
        ("normalize_then_sum", "batch_std"),
    ],
)
def test_rescore_with_the_own_weights_gives_what_the_run_stored_to_the_bit(
    combination: str, normalization: str, tmp_path: Path, configs_dir: Path
) -> None:
    options = (f"reward.combine={combination}", f"advantage.normalization={normalization}")
    config = make_config(configs_dir, *options, "advantage.clip=1.2", prompts=5, images=6)
    folder = store_run(tmp_path, config, *random_steps(config, 3, seed=3))
    rescoring = rescore(folder, [])
    # The first group of every step is a zero-std group. 3 * 5 groups of 6 images.
    assert (rescoring.steps, rescoring.groups, rescoring.images) == (3, 15, 90)
    assert (rescoring.zero_std_before, rescoring.ranked_groups) == (3, 12)
    assert (rescoring.changed_winners, rescoring.rank_correlation) == (0, 1.0)
    assert rescoring.changes == rescoring.gaining == rescoring.losing == ()
    # Spelt out, the own weights change no less.
    again = rescore(folder, ["reward.terms.ocr.weight=0.3", f"reward.combine={combination}"])
    assert again == rescoring


@pytest.mark.parametrize("combination", ["weighted_sum", "normalize_then_sum"])
def test_rescore_leaves_out_what_the_run_left_out_while_the_term_has_a_weight(
    combination: str, tmp_path: Path, configs_dir: Path
) -> None:
    config = make_config(configs_dir, f"reward.combine={combination}", prompts=3, images=3)
    raw = torch.rand(3, 3, 4, generator=torch.Generator().manual_seed(0))
    # The third term (ocr) refuses an image of the second group, and all of the third.
    raw[1, 1, 2] = raw[2, :, 2] = torch.nan
    applies = torch.ones(3, 4, dtype=torch.bool)
    step = make_experience(config, raw, applies, torch.zeros(3, 3))
    folder = store_run(tmp_path, config, step)
    rescoring = rescore(folder, [])
    assert (rescoring.changed_winners, rescoring.zero_std_before, rescoring.ranked_groups) == (
        0,
        1,
        2,
    )
    assert rescoring.gaining == rescoring.losing == ()
    # Without a weight it leaves nothing out.
    without = rescore(folder, ["ocr=0"])
    assert (without.zero_std_before, without.zero_std_after) == (1, 0)
    moved = {image.image for image in (*without.gaining, *without.losing)}
    assert "images/step-000001/p2-0.png" in moved


@pytest.mark.parametrize("column", ["total", "advantage"])
def test_rescore_refuses_a_table_that_is_one_bit_off_by_name(
    column: str, tmp_path: Path, configs_dir: Path
) -> None:
    config = make_config(configs_dir, prompts=5, images=6)
    steps = random_steps(config, 3, seed=0)
    folder = store_run(tmp_path, config, *steps)
    stored = steps[1].totals if column == "total" else steps[1].advantages
    next_value = torch.nextafter(stored[4, 2], torch.tensor(9.0)).item()
    edit_table(folder, 2, column, 4 * 6 + 2, next_value)
    with pytest.raises(StorageError, match=rf"step-000002.parquet: column {column} of prompt p4"):
        rescore(folder, [])


def test_rescore_refuses_a_config_that_is_not_the_one_trained_with(small_run: RunFolder) -> None:
    text = small_run.config_path.read_text()
    write_atomically(small_run.config_path, text.replace("weight: 0.3", "weight: 0.31").encode())
    with pytest.raises(StorageError, match=r"step-000001.parquet: column total of prompt p0"):
        rescore(small_run, [])


def test_rescore_counts_winners_and_ranks(small_run: RunFolder) -> None:
    # With 0.4 for aesthetic p0 has (0.3, 0.15 + 0.4, 0.4): the winner moves from 0 to 1, and of
    # the three pairs 0-1 and 0-2 turn round: tau = (1 - 2) / 3. p1 has (0, 0.4, 0.7): as before.
    rescoring = rescore(small_run, ["reward.terms.aesthetic.weight=0.4"])
    assert rescoring.changed_winners == 1
    assert rescoring.ranked_groups == 2
    assert rescoring.rank_correlation == pytest.approx((-1 / 3 + 1) / 2)
    change = rescoring.changes[0]
    assert (change.key, change.before, change.after) == ("reward.terms.aesthetic.weight", 0.1, 0.4)


def test_rescore_gives_the_shares_before_and_after(small_run: RunFolder) -> None:
    rescoring = rescore(small_run, ["reward.terms.ocr.weight=0"])
    names = [term.name for term in rescoring.terms]
    assert names == ["lpips", "ssim", "ocr", "aesthetic"]
    # As they were set, not as float32 holds them.
    assert [term.weight_before for term in rescoring.terms] == [0.4, 0.2, 0.3, 0.1]
    assert [term.weight_after for term in rescoring.terms] == pytest.approx([0.4, 0.2, 0, 0.1])
    # p0: total (0.3, 0.25, 0.1), mean 0.65 / 3, so 3 * variance is 0.1625 - 0.4225 / 3 = 0.065 / 3.
    # Its ocr part (0.3, 0.15, 0), mean 0.15, has 3 * covariance 0.3 * (0.3 - 0.65 / 3) ... summed
    # as products less means: 0.1275 - 3 * 0.15 * 0.65 / 3 = 0.03; share 0.03 * 3 / 0.065.
    # p1: total (0, 0.1, 0.4), 0.17 - 0.25 / 3; ocr (0, 0, 0.3), 0.12 - 0.15 / 3.
    first = 0.03 / (0.1625 - 0.4225 / 3)
    second = (0.12 - 0.15 / 3) / (0.17 - 0.25 / 3)
    share = (first + second) / 2
    assert [term.share_before for term in rescoring.terms] == pytest.approx(
        [0, 0, share, 1 - share], abs=1e-6
    )
    # Nothing but aesthetic is left to tell images apart.
    assert [term.share_after for term in rescoring.terms] == pytest.approx([0, 0, 0, 1], abs=1e-6)


def test_rescore_names_the_images_that_gain_and_lose_most(small_run: RunFolder) -> None:
    rescoring = rescore(small_run, ["reward.terms.ocr.weight=0"])
    # Centred. p0 goes from (0.3, 0.25, 0.1) - 0.65 / 3 to (0, 0.1, 0.1) - 0.2 / 3: changes of
    # -0.15, 0, 0.15. p1 goes from (0, 0.1, 0.4) - 0.5 / 3 to the same: 0.1, 0.1, -0.2.
    gaining = [(image.prompt_id, image.sample) for image in rescoring.gaining]
    assert gaining[0] == ("p0", 2)
    assert sorted(gaining[1:3]) == [("p1", 0), ("p1", 1)]
    assert [(image.prompt_id, image.sample) for image in rescoring.losing][:2] == [
        *(("p1", 2), ("p0", 0))
    ]
    most = rescoring.losing[0]
    assert (most.step, most.prompt, most.image) == (1, PROMPT, "images/step-000001/p1-2.png")
    assert most.advantage_before == pytest.approx(0.4 - 0.5 / 3)
    assert most.advantage_after == pytest.approx(0.1 - 0.2 / 3)


@pytest.mark.parametrize("normalization", ["group_std", "batch_std"])
def test_rescore_makes_advantages_step_by_step_as_training_would(
    normalization: str, tmp_path: Path, configs_dir: Path
) -> None:
    config = make_config(configs_dir, prompts=5, images=6)
    steps = random_steps(config, 3, seed=5)
    overrides = [
        *("reward.combine=normalize_then_sum", "++reward.terms.lpips.std_floor=0.5"),
        *("reward.terms.ssim.weight=-0.3", f"advantage.normalization={normalization}"),
        *("advantage.std_floor=0.125", "advantage.clip=null"),
    ]
    rescoring = rescore(store_run(tmp_path, config, *steps), overrides)
    other = make_config(configs_dir, *overrides, prompts=5, images=6)
    trained = [
        make_experience(other, step.scores.raw, step.scores.is_applicable, step.penalties)
        for step in steps
    ]
    assert len(rescoring.gaining) == len(rescoring.losing) == 8
    for image in (*rescoring.gaining, *rescoring.losing):
        place = (int(image.prompt_id[1:]), image.sample)
        expected = trained[image.step - 1].advantages[place].item()
        assert image.advantage_after == expected
        before = steps[image.step - 1].advantages[place].item()
        assert image.advantage_before == before
    assert rescoring.zero_std_after == sum(int(is_zero_std(step.totals).sum()) for step in trained)
    # group_std is what the run had.
    assert len(rescoring.changes) == 6 - (normalization == "group_std")


def test_rescore_refuses_weights_that_leave_a_prompt_without_a_total(
    tmp_path: Path, configs_dir: Path
) -> None:
    config = make_config(configs_dir, prompts=2, images=2)
    is_applicable = torch.tensor([[True, True, True, True], [False, False, True, True]])
    raw = torch.rand(2, 2, 4) * is_applicable[:, None, :]
    step = make_experience(config, raw, is_applicable, torch.zeros(2, 2))
    overrides = ["reward.terms.ocr.weight=0", "reward.terms.aesthetic.weight=0"]
    rule = r"prompt p1 .*\(ocr, aesthetic\).* reward.terms.ocr.weight=0.1"
    with pytest.raises(ConfigError, match=rule):
        rescore(store_run(tmp_path, config, step), overrides)


def test_rescore_names_terms_that_apply_to_few_prompts(tmp_path: Path, configs_dir: Path) -> None:
    config = make_config(configs_dir, prompts=3, images=2)
    is_applicable = torch.tensor([[False, False, True, True], *[[False, False, False, True]] * 2])
    step = make_experience(config, torch.rand(3, 2, 4), is_applicable, torch.zeros(3, 2))
    # The same prompts at both steps count once.
    folder = store_run(tmp_path / "run", config, step, step)
    changed = rescore(folder, ["reward.terms.ocr.weight=0.7", "reward.terms.aesthetic.weight=0.7"])
    of_two, of_ocr = changed.rare_terms
    assert re.match(r"lpips and ssim \(30% .*none of the 3 prompts", of_two)
    assert re.match(r"ocr \(35% .* 1 of the 3 prompts", of_ocr)
    # The others have no share.
    assert [term.name for term in changed.terms] == ["ocr", "aesthetic"]


def test_rescore_command_says_that_nothing_was_changed_and_what_can_be(
    small_run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rescore", str(small_run.path), "reward.terms.ocr.weight=0.3"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("ConfigError: reward.terms.ocr.weight=0.3: ")
    assert "ocr=0.3 aesthetic=0.1" in said
