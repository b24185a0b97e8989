"""Compare seconds and memory of replay and update with a plain implementation.

python -m benchmarks.update [--adapter-rank 32] [--repeats 3] [--side 1024] [--batch 4]

A language model of hidden size 512 and 4 layers with the published head (16512 outputs) learns from
one rollout of full grids. Plain: logits of every output for all rows at once, `log_softmax`,
`gather`, the entropy of every token, a second model as the reference. Ours: `update_policy` on a
`Policy`, row by row. With `--adapter-rank` both train adapters, else the language model and head.
Each side runs in its own process, and they update in turns; medians and their ratios are printed.
The file also contains the differences in loss, gradient norm and entropy between the two, and the
floor: the time of the products that both sides need, at the speed of the head's product, which is
measured after each update. The floor's ratio to the plain side is the lowest possible at this
speed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Literal, cast

import torch
from torch import Tensor, nn

from benchmarks.embedded import tiny_config
from benchmarks.timing import ROOT, Labels, Result, Target, compare, option_parser, publish
from glm_grpo.config import Config
from glm_grpo.config.losses import ClippedLoss
from glm_grpo.config.sections import TrainSection
from glm_grpo.grpo.learning_rate import LearningRate
from glm_grpo.grpo.losses import LossInputs, grpo_loss
from glm_grpo.grpo.update import Learner, update_policy
from glm_grpo.models.glm_image.planner import GlmImagePlanner, PartConfigs
from glm_grpo.models.glm_image.policy import GlmImagePolicy
from glm_grpo.models.glm_image.token_grid import generated_positions, token_layout
from glm_grpo.plan.floors import update_flops
from glm_grpo.plan.memory import BatchShape
from glm_grpo.tiny.models import PolicySizes, build_policy_model, build_processor
from glm_grpo.types import Experience, ImageBatch, PromptBatch, Rollout
from rewards.types import Prompt, RewardTable

SIZES = PolicySizes(
    codebook=16384,
    reserved=128,
    hidden_size=512,
    intermediate_size=1408,
    heads=8,
    key_value_heads=2,
    rope_theta=10000.0,
    rope_section=(8, 12, 12),
)
LOSS = ClippedLoss(
    clip_low=0.2,
    clip_high=0.2,
    kl_coef=0.02,
    kl_estimator="k3",
    kl_placement="loss",
    kl_behaviour_coef=0.0,
    importance_weights="none",
)
TRAIN = TrainSection(
    steps=1,
    seed=0,
    epochs_per_rollout=1,
    micro_batch_size=1,
    checkpoint_every=1,
    keep_checkpoints=1,
    eval_every=1,
)
MEGABYTE = 2**20
UPDATES_PER_PROCESS = 3
"""Counted after one warm-up. Processes differ, so results come from more than one pair."""
TIME_TARGET = Target("at most", 0.9)
MEMORY_TARGET = Target("at most", 0.35)
TARGET_SIZE = (1024, 4)
"""Side and batch of both targets; at small sizes, fixed costs hide the growth."""


@dataclass(frozen=True)
class Outcome:
    """Result of one update.

    Attributes:
        loss: Value of the loss.
        grad_norm: L2 norm of the gradient.
        entropy: Mean over tokens, nats.
    """

    loss: float
    grad_norm: float
    entropy: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = option_parser(__doc__)
    parser.add_argument("--side", type=int, default=1024, help="pixels; T = 256 + (side / 32)^2")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--adapter-rank", type=int, help="learn adapters; left out: every weight")
    parser.add_argument("--child", choices=("plain", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        _serve(options)
        return
    runs: dict[str, list[dict[str, float]]] = {"plain": [], "ours": []}
    for begun in range(0, options.repeats, UPDATES_PER_PROCESS):
        with _side("plain", options) as plain, _side("ours", options) as ours:
            sides = {"plain": plain, "ours": ours}
            for update in sides.values():
                update()
            for repeat in range(begun, min(begun + UPDATES_PER_PROCESS, options.repeats)):
                for name in sides if repeat % 2 == 0 else reversed(sides):
                    runs[name].append(sides[name]())
    publish(_results(runs["ours"], runs["plain"], options), options.json)


def _results(
    ours: list[dict[str, float]], plain: list[dict[str, float]], options: argparse.Namespace
) -> list[Result]:
    """Results for seconds and memory, both with the differences of the reported values."""
    details = {
        "tokens": token_layout(options.side, options.side).num_tokens,
        "loss_difference": abs(ours[0]["loss"] - plain[0]["loss"]),
        "grad_norm_relative": abs(ours[0]["grad_norm"] / plain[0]["grad_norm"] - 1),
        "entropy_difference": abs(ours[0]["entropy"] - plain[0]["entropy"]),
        "floor_seconds": statistics.median(run["floor_seconds"] for run in ours + plain),
        "floor_ratio": statistics.median(run["floor_seconds"] / run["seconds"] for run in plain),
    }
    command = f"python -m benchmarks.update --side {options.side} --batch {options.batch}"
    phase = f"update {options.batch} x {details['tokens']:.0f} tokens"
    if options.adapter_rank is not None:
        command += f" --adapter-rank {options.adapter_rank}"
        phase += ", adapters"
    return [
        compare(
            Labels(
                phase=f"{phase}, {what}",
                against="full logits, log_softmax, entropy, a second model",
                unit=unit,
                command=f"{command} --repeats {options.repeats}",
            ),
            [run[key] for run in ours],
            [run[key] for run in plain],
            target=target if (options.side, options.batch) == TARGET_SIZE else None,
            details=details,
        )
        for what, key, unit, target in (
            ("time", "seconds", "s", TIME_TARGET),
            ("memory", "peak_megabytes", "MB", MEMORY_TARGET),
        )
    ]


@contextmanager
def _side(name: str, options: argparse.Namespace) -> Iterator[Callable[[], dict[str, float]]]:
    """Start a process that updates once per call, and returns its measurements.

    Raises:
        SystemExit: The process failed; its output says why.
    """
    command = [sys.executable, "-m", "benchmarks.update", "--child", name]
    command += ["--side", str(options.side), "--batch", str(options.batch)]
    if options.adapter_rank is not None:
        command += ["--adapter-rank", str(options.adapter_rank)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        questions, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

        def update() -> dict[str, float]:
            with suppress(BrokenPipeError):
                questions.write("update\n")
                questions.flush()
            line = answers.readline()
            if not line:
                raise SystemExit(f"benchmarks.update --child {name} ended: {process.wait()}")
            figures: dict[str, float] = json.loads(line)
            return figures

        yield update


def _config(options: argparse.Namespace, adapter_rank: int | None) -> Config:
    adapter = "null" if adapter_rank is None else f"{{rank: {adapter_rank}, alpha: 1.0}}"
    sides = (f"rollout.height={options.side}", f"rollout.width={options.side}")
    once = ("train.epochs_per_rollout=1", "train.minibatches=1")
    return tiny_config(
        *(f"model.adapter={adapter}", "model.gradient_checkpointing=false", "loss.kl_coef=0.02"),
        *(*sides, *once, "rollout.temperature=1.0"),
    )


def _build_policy(config: Config) -> GlmImagePolicy:
    model = build_policy_model(seed=0, sizes=SIZES)
    # Neither is used, and both would count as the model's memory.
    model.model.visual = model.model.vqmodel = None
    pipeline = SimpleNamespace(vision_language_encoder=model, processor=build_processor(SIZES))
    return GlmImagePolicy(config, pipeline)


def _serve(options: argparse.Namespace) -> None:
    """Write the measurements of an update for each line read; memory excludes the models."""
    answers = sys.stdout
    with redirect_stdout(sys.stderr):
        floor_flops = _floor_flops(options)
        update = _build_update(options)
        before = _status_bytes("VmRSS")
        for _ in sys.stdin:
            # Linux then counts the peak from here.
            Path("/proc/self/clear_refs").write_text("5")
            begun = time.perf_counter()
            outcome = update()
            seconds = time.perf_counter() - begun
            peak = (_status_bytes("VmHWM") - before) / MEGABYTE
            figures = {"seconds": seconds, "peak_megabytes": peak, **asdict(outcome)}
            figures["floor_seconds"] = floor_flops / _flops_per_second(options)
            answers.write(json.dumps(figures) + "\n")
            answers.flush()


def _status_bytes(key: Literal["VmRSS", "VmHWM"]) -> int:
    """Memory of this process, or its peak, from Linux's /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return int(kilobytes) * 1024


def _floor_flops(options: argparse.Namespace) -> int:
    """Operations of the products of an update, with prompts of one token."""
    with torch.device("meta"):
        language = build_policy_model(seed=0, sizes=SIZES).config.to_dict()
    config = _config(options, options.adapter_rank)
    planner = GlmImagePlanner(PartConfigs(language, {}, {}, {}))
    return update_flops(planner, config, BatchShape(1, options.batch, prompt_tokens=1))


def _flops_per_second(options: argparse.Namespace) -> float:
    """Speed of the head's product with one sequence; the best of three."""
    tokens = token_layout(options.side, options.side).num_tokens
    hidden = torch.ones(tokens, SIZES.hidden_size)
    head = torch.ones(SIZES.codebook, SIZES.hidden_size)
    logits = torch.empty(tokens, SIZES.codebook)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        torch.mm(hidden, head.T, out=logits)
        seconds.append(time.perf_counter() - begun)
    return 2 * tokens * head.numel() / min(seconds)


def with_reference(experience: Experience, policy: GlmImagePolicy, *, rows: int) -> Experience:
    """The experience with log-probs under the reference, as a run reads them, `rows` at a time."""
    images = experience.rollout.token_ids.shape[:2]
    parts = [
        policy.reference_log_probs(experience.prompts, experience.rollout, each).cpu()
        for each in torch.arange(images.numel()).split(rows)
    ]
    return replace(experience, reference_log_probs=torch.cat(parts).unflatten(0, images))


def _build_update(options: argparse.Namespace) -> Callable[[], Outcome]:
    config = _config(options, options.adapter_rank)
    second = None
    if options.child == "plain":
        policy = _build_policy(config.without_reference())
        second = _build_policy(_config(options, None).without_reference())
    else:
        policy = _build_policy(config)
    experience = _make_experience(options.side, options.batch)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.0)
    policy.encode(experience.prompts)
    if second is None:
        rate = LearningRate(
            optimizer, peak=0.0, schedule="constant", warmup_updates=0, total_updates=1
        )
        learner = Learner(policy, optimizer, rate)

        def update() -> Outcome:
            given = with_reference(experience, policy, rows=TRAIN.micro_batch_size)
            (report,) = update_policy(learner, given, LOSS, TRAIN)
            found = report.metrics
            return Outcome(found["loss/total"], found["optim/grad_norm"], found["policy/entropy"])
    else:

        def update() -> Outcome:
            return _plain_update(policy, second, optimizer, experience)

    return update


def _plain_update(
    policy: GlmImagePolicy,
    second: GlmImagePolicy,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
) -> Outcome:
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        reference = _chosen(_plain_log_probs(policy, experience, *second.modules()), experience)
    every = _plain_log_probs(policy, experience, *policy.modules())
    with torch.no_grad():
        # Row by row; at once, two more tensors of this size would be created.
        entropy = torch.stack([-(row.exp() * row).sum(dim=-1) for row in every]).mean()
    log_probs = _chosen(every, experience)
    inputs = LossInputs(
        log_probs,
        log_probs.detach(),
        reference,
        experience.advantages.flatten(0, 1),
    )
    loss = grpo_loss(inputs, LOSS)
    loss.total.backward()
    norm = nn.utils.clip_grad_norm_(policy.trainable_parameters(), math.inf)
    optimizer.step()
    return Outcome(loss.total.item(), float(norm), entropy.item())


def _plain_log_probs(
    policy: GlmImagePolicy, experience: Experience, language_model: Any, head: nn.Module
) -> Tensor:
    batch = experience.prompts
    token_ids = experience.rollout.token_ids.flatten(0, 1)
    inputs = policy.encode(batch).rows(torch.zeros(len(token_ids), dtype=torch.int64))
    layout = token_layout(batch.height, batch.width)
    later = generated_positions(layout, 0).unsqueeze(1) + inputs.next_position.view(1, -1, 1)
    hidden = language_model(
        input_ids=torch.cat([inputs.input_ids, token_ids[:, :-1]], dim=1),
        attention_mask=nn.functional.pad(
            inputs.attention_mask, (0, token_ids.shape[1] - 1), value=1
        ),
        position_ids=torch.cat([inputs.position_ids, later[..., :-1]], dim=2),
        use_cache=False,
    ).last_hidden_state[:, -layout.num_tokens :]
    # Over the codebook, like ours, to make losses comparable; this drops 128 of 16512 outputs.
    every: Tensor = head(hidden)[..., : SIZES.codebook].log_softmax(dim=-1)
    return every


def _chosen(every: Tensor, experience: Experience) -> Tensor:
    token_ids = experience.rollout.token_ids.flatten(0, 1)
    return every.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def _make_experience(side: int, batch: int) -> Experience:
    generator = torch.Generator().manual_seed(0)
    tokens = token_layout(side, side).num_tokens
    prompt = Prompt("sign", 'white on green: a triangle above the word "OPEN"')
    shape = (1, batch, tokens)
    level = -math.log(SIZES.codebook)
    totals = torch.randn(1, batch, generator=generator)
    return Experience(
        prompts=PromptBatch((prompt,), batch, side, side, seed=0, decode_seeds=(0,)),
        rollout=Rollout(
            token_ids=torch.randint(SIZES.codebook, shape, generator=generator),
            log_probs=level + 0.1 * torch.randn(shape, generator=generator),
            sampling_mask=None,
        ),
        images=ImageBatch(torch.zeros(1, batch, 3, 1, 1, dtype=torch.uint8), (0,)),
        scores=RewardTable(
            ("none",),
            torch.zeros(1, batch, 1),
            torch.ones(1, 1, dtype=torch.bool),
            torch.ones(1),
            torch.ones(1),
        ),
        totals=totals,
        penalties=torch.zeros_like(totals),
        advantages=(totals - totals.mean())[..., None],
    )


if __name__ == "__main__":
    main()
