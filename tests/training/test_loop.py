"""The loop, on a policy that is a table of logits and a decoder that draws its tokens as greys."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from glm_grpo.data.prompts import load_prompts
from glm_grpo.errors import HackingError, MemoryLimitError, NonFiniteError, StorageError
from glm_grpo.grpo.advantages import group_advantages
from glm_grpo.models.offload import Offload
from glm_grpo.run.checkpoints import load_checkpoint, newest_checkpoint
from glm_grpo.run.finding import find_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.tables import evaluation_steps, read_metrics, read_table
from glm_grpo.run.trackers import Trackers
from glm_grpo.setup.prompts import Prompts
from glm_grpo.setup.trainer import build_trainer
from glm_grpo.terminal import explain
from glm_grpo.training import records, saver
from glm_grpo.training.loop import Trainer
from glm_grpo.training.models import Models
from glm_grpo.training.monitors.hacking import HackingMonitor
from glm_grpo.types import PromptBatch, Rollout
from rewards.canaries import Departure
from rewards.score import Scorer, Term
from rewards.types import RewardError
from tests.factories import Brightness, NoDecoder, NoPolicy, tiny_config
from tests.grpo.table_policy import TablePolicy, score
from tests.opened import open_run, prepared_run

SIDE, TOKENS, CODEBOOK = 64, 4, NoPolicy.codebook_size

RUN = (
    *("rollout.prompts_per_step=2", "rollout.group_size=2", "train.micro_batch_size=4"),
    *(f"rollout.height={SIDE}", f"rollout.width={SIDE}", "decode.steps=2", "trackers=[]"),
    *("train.steps=4", "train.eval_every=1000", "train.checkpoint_every=1"),
    *("train.keep_checkpoints=9", "eval.samples_per_prompt=1", "optim.learning_rate=0.1"),
    *("optim.warmup_steps=0", "optim.schedule=constant", "loss.kl_coef=0"),
    "advantage.credit=image",
)


class DrawingPolicy(TablePolicy, NoPolicy):
    """Also samples, and has a state to store."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        super().__init__(torch.randn(TOKENS, CODEBOOK, generator=generator))
        self.network = nn.Module()
        self.network.logits = self.logits

    def sample(self, batch: PromptBatch, **others: Any) -> Rollout:
        generator = torch.Generator().manual_seed(batch.seed)
        shape = (len(batch.prompts), batch.group_size)
        odds = self.logits.detach().softmax(-1)
        drawn = torch.multinomial(odds, shape[0] * shape[1], replacement=True, generator=generator)
        token_ids = drawn.T.reshape(*shape, TOKENS).contiguous()
        return Rollout(token_ids, score(self.logits, token_ids).detach(), None)

    def state_tensors(self) -> dict[str, Tensor]:
        return {"logits": self.logits.data}

    def load_state_tensors(self, tensors: Any) -> None:
        self.logits.data.copy_(tensors["logits"])


class Greys(NoDecoder):
    """One grey a token, side by side; with fewer steps the negative."""

    steps = 2

    def decode_groups(self, batch: PromptBatch, token_ids: Tensor) -> Iterator[Tensor]:
        for tokens in token_ids:
            levels = tokens * 16 if self.steps == Greys.steps else 255 - tokens * 16
            greys = levels.to(torch.uint8).repeat_interleave(SIDE // TOKENS, dim=1)
            yield greys[:, None, None, :].expand(-1, 3, SIDE, -1).contiguous()


class Run:
    """A trainer and what it works with; `step` is the number of the step at hand, from 0."""

    trainer: Trainer
    models: Models
    folder: RunFolder
    step = 0

    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder)

    def fail(self, error: type[Exception]) -> str:
        """Runs into the error; its text."""
        with pytest.raises(error) as caught:
            self.trainer.run()
        return explain(caught.value)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Builds a run on one term.

    `change` is given the scores of each group, its prompt and the number of the step, `at_step` the
    run and the number of each step before it begins. Another run of a folder goes on with it.
    """
    training, held_out = tmp_path / "prompts.txt", tmp_path / "held_out.txt"
    training.write_text("".join(f"prompt {row}\n" for row in range(8)))
    held_out.write_text("held out 0\nheld out 1\nheld out 2\n")

    def build(
        *overrides: str,
        folder: str = "run",
        weight: float = 1.0,
        change: Callable[..., Tensor] = lambda scores, prompt, step: scores,
        at_step: Callable[[Run, int], None] = lambda run, step: None,
    ) -> Run:
        run = Run()
        run.folder = RunFolder(tmp_path / folder)
        paths = (f"data.path={training}", f"data.eval_path={held_out}")
        config = tiny_config(*RUN, *paths, f"run_dir={run.folder.path}", *overrides)
        term = Brightness(lambda scores, prompt: change(scores, prompt, run.step))
        run.models = Models(
            DrawingPolicy(), Greys(), Scorer([Term("brightness", term, weight)]), Offload({})
        )
        sources = (
            load_prompts(str(path), height=SIDE, width=SIDE) for path in (training, held_out)
        )
        opened = open_run(config)
        run.trainer = build_trainer(
            prepared_run(config, Prompts(*sources), opened.checkpoint),
            run.models,
            opened.folder,
            Console(quiet=True),
            show=lambda *_: None,
        )
        take = run.trainer.step.take

        def announced(step: int, *arguments: Any, **options: Any) -> Any:
            run.step = step
            at_step(run, step)
            return take(step, *arguments, **options)

        run.trainer.step.take = announced
        return run

    return build


def break_gradient(*steps: int) -> Callable[[Run, int], None]:
    """Makes the gradient of some steps infinite."""

    def at_step(run: Run, step: int) -> None:
        if step in steps:
            parameter = run.models.policy.logits
            hook = parameter.register_hook(
                lambda gradient: (hook.remove(), gradient * torch.inf)[1]
            )

    return at_step


@pytest.mark.usefixtures("own_defaults")
def test_a_run_is_the_same_with_another_default_dtype(make_run: Any) -> None:
    keys = ("loss=sapo", "train.eval_every=2")
    usual, run = (make_run(*keys, folder=folder) for folder in ("usual", "run"))
    usual.trainer.run()
    torch.set_default_dtype(torch.bfloat16)
    run.trainer.run()
    for name in ("reward/mean", "loss/total", "optim/grad_norm", "eval/total"):
        assert [row.get(name) for row in run.rows()] == [row.get(name) for row in usual.rows()]
    scores, expected = (
        read_table(each.folder.rollout_path(1))["raw/brightness"] for each in (run, usual)
    )
    assert scores == expected


def test_one_broken_gradient_leaves_weights_and_moments_as_they_were(make_run: Any) -> None:
    run = make_run("train.steps=3", at_step=break_gradient(2))
    assert run.trainer.run() is not None
    assert [row["optim/skipped_updates"] for row in run.rows()[1:]] == [0, 1, 0]
    before, after, later = (
        load_checkpoint(run.folder.checkpoint_dir(step)).tensors for step in (1, 2, 3)
    )
    for stem in ("policy", "optimizer"):
        assert all(tensor.equal(after[stem][name]) for name, tensor in before[stem].items())
    assert not later["policy"]["logits"].equal(after["policy"]["logits"])


def test_three_broken_steps_of_a_float16_policy_name_another_dtype(make_run: Any) -> None:
    def at_step(run: Run, step: int) -> None:
        # Not before the self-checks of the first step, which build a policy of fewer layers.
        run.models.policy.dtype = torch.float16
        break_gradient(2, 3, 4)(run, step)

    run = make_run("train.steps=5", at_step=at_step)
    assert "model.dtype=bfloat16" in run.fail(NonFiniteError)


def test_three_broken_steps_in_a_row_end_a_run_that_can_be_gone_on_with(make_run: Any) -> None:
    run = make_run("train.steps=5", "train.checkpoint_every=9", at_step=break_gradient(2, 3, 4))
    message = run.fail(NonFiniteError)
    assert "step 4" in message
    assert [row["optim/skipped_updates"] for row in run.rows()[1:]] == [0, 1, 1, 1]
    resume = re.search(r"train\.resume=(\S+)$", message)
    assert resume is not None

    resumed = make_run("train.steps=5", "train.checkpoint_every=9", f"train.resume={resume[1]}")
    assert resumed.trainer.run() is not None
    # The updates that were skipped stay so.
    assert [row["optim/skipped_updates"] for row in run.rows()[1:]] == [0, 1, 1, 1, 0]


def test_finite_scores_whose_sum_overflows_name_the_image(make_run: Any) -> None:
    run = make_run(weight=2.0, change=lambda scores, *_: scores * 0 + 3e38)
    message = run.fail(RewardError)
    assert "prompt row 0, image 0 is inf" in message
    assert run.rows() == []


def test_rollouts_are_decoded_with_their_own_steps_and_rechecked_in_full(make_run: Any) -> None:
    # Fewer steps draw negatives, whose ranks are the other way round.
    cheap = ("decode.rollout_steps=1", "decode.recheck_every=1", "train.steps=2")
    run = make_run(*cheap, "rollout.group_size=8", "train.eval_every=1")
    run.trainer.run()
    found = [row["decode/rank_correlation/brightness"] for row in run.rows()[1:]]
    assert found == pytest.approx([-1.0, -1.0])
    images = read_table(run.folder.evaluation_path(0))["raw/brightness"].to_pylist()
    assert all(score < 0.95 for score in images)


def test_a_canary_outside_its_band_stops_and_saves_where_asked_to(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = HackingMonitor.measure

    def game(monitor: HackingMonitor, step: int, *others: Any) -> Any:
        departures = (Departure("edge_density", 0.0, 0.2, 0.4),) if step == 3 else ()
        return replace(measure(monitor, step, *others), departures=departures)

    monkeypatch.setattr(HackingMonitor, "measure", game)
    run = make_run("reward.on_hacking=stop", "train.checkpoint_every=9")
    message = run.fail(HackingError)
    assert re.search(r"edge_density 0 .*0\.2\.\.0\.4", message)
    assert "on_hacking=warn" in message
    assert [row["step"] for row in run.rows()] == [0, 1, 2, 3]
    assert load_checkpoint(newest_checkpoint(run.folder)).step == 3


@pytest.mark.parametrize(
    ("method", "call", "phase", "key"),
    [
        # Evaluated before; of two updates a step, the first after the self-check and step 1.
        ("sample", 3, "rollout", "rollout.prompts_per_step"),
        ("replay", 4, "update", "train.micro_batch_size"),
    ],
)
def test_memory_that_runs_out_names_the_phase_and_keeps_the_step_before(
    make_run: Any, method: str, call: int, phase: str, key: str
) -> None:
    run = make_run("train.epochs_per_rollout=2", "train.checkpoint_every=9")
    policy, calls = run.models.policy, []
    real, weights = getattr(policy, method), policy.logits

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(weights.detach().clone())
        if len(calls) == call:
            raise MemoryError
        return real(*arguments, **options)

    setattr(policy, method, failing)
    message = run.fail(MemoryLimitError)
    assert f"{phase} phase" in message
    assert key in message
    saved = load_checkpoint(newest_checkpoint(run.folder))
    assert saved.step == 1
    assert saved.tensors["policy"]["logits"].equal(calls[-1])


GAINS = (0.0, 0.1, 0.3, 0.2, 0.25)
"""What is added to the scores of the evaluation at each step: the second step is the best."""


def rise(scores: Tensor, prompt: Any, step: int) -> Tensor:
    return scores + GAINS[step] * ("held out" in prompt.prompt)


def test_a_term_that_fails_in_an_evaluation_loses_neither_the_step_nor_the_evaluation(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(scores: Tensor, prompt: Any, step: int) -> Tensor:
        if step == 2 and "held out" in prompt.prompt:
            raise ConnectionError("the scorer is gone")
        return rise(scores, prompt, step)

    often = ("train.steps=3", "train.eval_every=1", "train.checkpoint_every=9")
    run = make_run(*often, change=fail)
    assert "the scorer is gone" in run.fail(RewardError)
    assert load_checkpoint(newest_checkpoint(run.folder)).step == 2
    assert ["eval/total" in row for row in run.rows()] == [True, True, False]

    def killed(*_: Any) -> None:
        with run.folder.metrics_path.open("a") as file:
            file.write('{"step": 2, "eval/tot')
        raise KeyboardInterrupt

    def at_step_2(scores: Tensor, prompt: Any, step: int) -> Tensor:
        """A resumed run begins with the evaluation of step 2."""
        return rise(scores, prompt, step or 2)

    # It is made up for, also where a kill cut off its line.
    resumed = make_run(*often, "train.resume=auto", change=at_step_2)
    with monkeypatch.context() as patch:
        patch.setattr(records, "append_metrics", killed)
        with pytest.raises(KeyboardInterrupt):
            resumed.trainer.run()
    resumed = make_run(*often, "train.resume=auto", change=at_step_2)
    assert resumed.trainer.run() is not None
    whole = make_run(*often, folder="whole", change=rise)
    whole.trainer.run()
    assert evaluation_steps(run.folder) == [0, 1, 2, 3]
    for name in ("eval/total", "reward/mean", "optim/grad_norm"):
        assert [row.get(name) for row in run.rows()] == [row.get(name) for row in whole.rows()]
    for each in (run, whole):
        assert load_checkpoint(newest_checkpoint(each.folder)).metadata["best_step"] == 2


def test_a_run_with_evaluations_in_the_lines_of_their_steps_goes_on(make_run: Any) -> None:
    def fail(run: Run, step: int) -> None:
        if step == 3:
            raise RewardError("the scorer is gone")

    often = ("train.steps=3", "train.eval_every=1", "train.checkpoint_every=9")
    run = make_run(*often, change=rise, at_step=fail)
    run.fail(RewardError)
    # As versions up to 0.2 wrote them.
    old = "".join(f"{json.dumps(row)}\n" for row in run.rows())
    run.folder.metrics_path.write_text(f'{old}{{"step": 3, "reward/me')
    make_run(*often, "train.resume=auto", change=rise).trainer.run()
    assert run.folder.metrics_path.read_text().startswith(f'{old}{{"step": 3, "reward/mean"')
    whole = make_run(*often, folder="whole", change=rise)
    whole.trainer.run()
    for name in ("eval/total", "reward/mean", "optim/grad_norm"):
        assert [row.get(name) for row in run.rows()] == [row.get(name) for row in whole.rows()]
    assert load_checkpoint(newest_checkpoint(run.folder)).metadata["best_step"] == 2


def test_totals_of_evaluations_compare_across_steps_and_the_best_checkpoint_is_kept(
    make_run: Any,
) -> None:
    run = make_run(
        *("reward.combine=normalize_then_sum", "train.eval_every=1", "train.keep_checkpoints=1"),
        "optim.learning_rate=1e-12",
        change=rise,
    )
    (*_, total) = run.trainer.run() or ()
    scores = [
        read_table(run.folder.evaluation_path(step))["raw/brightness"].to_pylist()
        for step in range(5)
    ]
    # By the base model's mean and std over all images, though training standardises in groups.
    start = torch.tensor(scores[0])
    expected = [fmean((torch.tensor(each) - start.mean()) / start.std()) for each in scores]
    totals = [row["eval/total"] for row in run.rows()]
    assert totals == pytest.approx([float(each) for each in expected], abs=1e-4)
    assert totals[0] < totals[1] < totals[3] < totals[4] < totals[2]
    assert (total.before, total.after) == pytest.approx((totals[0], totals[4]), abs=1e-6)
    assert load_checkpoint(newest_checkpoint(run.folder)).metadata["best_step"] == 2
    assert sorted(path.name[-1] for path in run.folder.checkpoints_dir.iterdir()) == ["2", "4"]


def test_the_average_of_the_weights_is_what_is_evaluated_and_found(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("eval.ema_decay=0.75", "train.eval_every=4")
    evaluated: list[Tensor] = []
    policy = run.models.policy
    real = policy.sample

    def sample(batch: PromptBatch, *, phase: str, **others: Any) -> Rollout:
        if phase == "evaluation":
            evaluated.append(policy.logits.detach().clone())
        return real(batch)

    monkeypatch.setattr(policy, "sample", sample)
    run.trainer.run()
    saved = load_checkpoint(newest_checkpoint(run.folder)).tensors
    assert evaluated[-1].equal(saved["average"]["logits"])
    assert not evaluated[-1].equal(saved["policy"]["logits"])
    assert evaluated[-1].equal(find_checkpoint(run.folder.path).evaluated()["logits"])


def test_flat_groups_are_replaced_stored_and_counted(make_run: Any) -> None:
    def flat(scores: Tensor, prompt: Any, step: int) -> Tensor:
        varied = torch.arange(len(scores)) / len(scores)
        return torch.full_like(scores, 0.5) if prompt.prompt < "prompt 5" else varied

    run = make_run("rollout.dynamic_sampling_rounds=6", "train.steps=2", change=flat)
    run.trainer.run()
    discarded = 0
    for row in run.rows()[1:]:
        groups = read_table(run.folder.rollout_path(row["step"])).to_pylist()[::2]
        # Two that vary are found before the eight prompts are used up, and none is drawn twice.
        assert [each["is_flat"] for each in groups] == [each["is_discarded"] for each in groups]
        assert sum(not each["is_flat"] for each in groups) == 2
        assert len({each["prompt_id"] for each in groups}) == len(groups)
        assert row["advantage/discarded_groups"] == len(groups) - 2
        discarded += len(groups) - 2
    assert discarded > 0


def test_a_step_begins_while_the_one_before_is_written_and_checkpoints_wait(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = threading.Event()
    recorded: dict[int, list[tuple[int, bool]]] = {}
    write, save = records.write_rollout, saver.save_checkpoint

    def write_late(folder: Any, experience: Any, images: Any, step: int, **options: Any) -> None:
        if step == 2:
            # Were it written before step 3 began, nobody would set it.
            assert third.wait(60)
        write(folder, experience, images, step, **options)

    def save_after_records(*arguments: Any, step: int, **options: Any) -> Any:
        recorded[step] = [(row["step"], "eval/total" in row) for row in run.rows()]
        return save(*arguments, step=step, **options)

    def at_step(run: Run, step: int) -> None:
        if step == 3:
            third.set()
        assert [*recorded] == ([3] if step == 4 else [])

    monkeypatch.setattr(records, "write_rollout", write_late)
    monkeypatch.setattr(saver, "save_checkpoint", save_after_records)
    run = make_run("train.checkpoint_every=3", "train.eval_every=3", at_step=at_step)
    run.trainer.run()
    first = [(0, True), (1, False), (2, False), (3, True)]
    assert recorded == {3: first, 4: [*first, (4, True)]}


def test_trackers_are_called_from_the_main_thread(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # MLflow binds its run to the thread that began it.
    threads = []
    for name in ("log", "log_groups", "log_evaluation", "close"):
        monkeypatch.setattr(Trackers, name, lambda *_: threads.append(threading.current_thread()))
    make_run("train.steps=2", "train.eval_every=1").trainer.run()
    assert {*threads} == {threading.main_thread()}


@pytest.mark.parametrize("every", [1, 1000], ids=["at its checkpoint", "at the next step"])
def test_what_cannot_be_written_ends_the_run_without_a_checkpoint(
    make_run: Any, make_read_only: Any, every: int
) -> None:
    run = make_run(f"train.checkpoint_every={every}")
    make_read_only(run.folder.rollouts_dir)
    assert "step-000001.parquet: Read-" in run.fail(StorageError)
    assert [row["step"] for row in run.rows()] == [0]
    assert not run.folder.checkpoints_dir.exists()
    assert [thread for thread in threading.enumerate() if thread.name.startswith("records")] == []


def refusing(images: Callable[[Any, int], Sequence[int]]) -> Callable[..., Any]:
    """A term that refuses the images that a function of prompt and step names."""

    def change(scores: Tensor, prompt: Any, step: int) -> list[float | None]:
        refused = images(prompt, step)
        return [None if row in refused else each for row, each in enumerate(scores.tolist())]

    return change


def test_a_run_goes_on_without_the_images_that_a_term_refuses(
    make_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    often = ("rollout.group_size=4", "train.steps=3", "train.eval_every=1")
    refused: list[str] = []

    def one_of_step_2(prompt: Any, step: int) -> Sequence[int]:
        is_chosen = step == 2 and (refused or [prompt.prompt_id])[0] == prompt.prompt_id
        if is_chosen and "held out" not in prompt.prompt:
            refused.append(prompt.prompt_id)
            return [1]
        return [0] if prompt.prompt == "held out 1" and step == 2 else []

    run = make_run(*often, change=refusing(one_of_step_2))
    assert run.trainer.run() is not None
    rows = read_table(run.folder.rollout_path(2)).to_pylist()
    of_group = [row for row in rows if row["prompt_id"] == refused[0]]
    raw, total, advantages = (
        torch.tensor([row[name] for row in of_group])
        for name in ("raw/brightness", "total", "advantage")
    )
    assert raw.isnan().tolist() == total.isnan().tolist() == [False, True, False, False]
    others = [0, 2, 3]
    settings = tiny_config(*RUN).advantage.model_dump(
        include={"normalization", "std_floor", "clip"}
    )
    smaller = group_advantages(raw[others][None], **settings)
    assert advantages[1] == 0
    torch.testing.assert_close(advantages[others], smaller[0])
    found = [row.get("reward/brightness/refused_fraction") for row in run.rows()[1:]]
    assert found == [0.0, 1 / 8, 0.0]
    line = f"step 2: .*brightness .*1 of 8 images: prompt {refused[0]}, image 1"
    assert re.search(line, caplog.text)

    # Nor does it end an evaluation, whose means are those of the other images.
    held_out = read_table(run.folder.evaluation_path(2))["total"].to_pylist()
    assert [math.isnan(each) for each in held_out] == [False, True, False]
    row = run.rows()[2]
    assert row["eval/total"] == pytest.approx((held_out[0] + held_out[2]) / 2)
    assert row["eval/brightness/refused_fraction"] == pytest.approx(1 / 3)
    assert re.search("evaluation .*step 2: .*brightness .*1 of 3 images", caplog.text)
    assert all(math.isfinite(row["optim/grad_norm"]) for row in run.rows()[1:])


def test_totals_of_a_resumed_run_are_scaled_by_the_images_that_were_not_refused(
    make_run: Any,
) -> None:
    often = ("reward.combine=normalize_then_sum", "train.steps=2", "train.eval_every=1")
    refuse = refusing(lambda prompt, step: [0] if prompt.prompt == "held out 1" else [])

    def change(scores: Tensor, prompt: Any, step: int) -> Any:
        return refuse(rise(scores, prompt, step), prompt, step)

    whole = make_run(*often, folder="whole", change=change)
    whole.trainer.run()

    def fail(run: Run, step: int) -> None:
        if step == 2:
            raise RewardError("the scorer is gone")

    run = make_run(*often, change=change, at_step=fail)
    run.fail(RewardError)
    make_run(*often, "train.resume=auto", change=change).trainer.run()
    totals = [[row["eval/total"] for row in each.rows()] for each in (run, whole)]
    assert totals[0] == totals[1]
    assert len(set(totals[0])) == 3
    # By mean and standard deviation of the two that have a score, 0 on average.
    assert totals[0][0] == pytest.approx(0.0, abs=1e-6)


def test_a_term_that_refuses_too_many_images_ends_the_run_with_everything_saved(
    make_run: Any,
) -> None:
    run = make_run(
        *("rollout.group_size=4", "train.steps=3", "train.checkpoint_every=9"),
        change=refusing(lambda prompt, step: [0, 3] if step == 2 else []),
    )
    message = run.fail(RewardError)
    assert re.search("brightness .*4 of 8 images.* 25%", message)
    assert load_checkpoint(newest_checkpoint(run.folder)).step == 1
    assert len([*run.folder.failure_dir(2).iterdir()]) == 4
    assert [row["step"] for row in run.rows()] == [0, 1]

    resumed = make_run(
        *("rollout.group_size=4", "train.steps=3", "train.checkpoint_every=9"),
        "train.resume=auto",
    )
    assert resumed.trainer.run() is not None
