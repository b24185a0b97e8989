"""A run is resumed with what it began with, or says what is different."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from glm_grpo.commands.eval import changes_since
from glm_grpo.config import Config, compose_config, flatten, with_absolute_paths
from glm_grpo.config.losses import CustomLoss
from glm_grpo.data.prompts import load_prompts
from glm_grpo.errors import CheckpointError
from glm_grpo.models.find import find_model
from glm_grpo.run.checkpoints import save_checkpoint
from glm_grpo.run.config import read_config
from glm_grpo.run.finding import find_checkpoint
from glm_grpo.run.folder import RunFolder
from glm_grpo.run.provenance import (
    Digests,
    Provenance,
    describe_mixed_scores,
    read_provenance,
    write_provenance,
)
from glm_grpo.setup.provenance import describe_provenance, keep_provenance
from tests.opened import OpenedRun, open_run
from tests.rewards.endpoint import Reply, answering
from tests.training.test_resume import CONFIGS, STATE, TENSORS

Change = Callable[[Path], object]
"""Changes files in the folder of `project`."""

SCORER = """

def score(prompts, images):
    return images.float().mean(dim=(1, 2, 3))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with prompts, images and the functions of a reward and a loss."""
    for name, colour in (("train", "red"), ("held", "blue")):
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"{name}.png")
        rows = [f'{{"prompt": "a {n} \\"A\\"", "target": "{name}.png"}}' for n in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "scorer.py").write_text(f"import scaling\n{SCORER}")
    (tmp_path / "scaling.py").write_text("FACTOR = 1")
    (tmp_path / "objective.py").write_text("def loss(inputs): ...\n")
    (tmp_path / "weights.safetensors").write_bytes(b"weights")
    save_checkpoint(RunFolder(tmp_path / "start"), step=1, tensors=TENSORS, metadata=STATE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compose(*overrides: str) -> Config:
    # Where the functions are found depends on the working folder.
    return _compose(Path.cwd(), *overrides)


@functools.cache
def _compose(_: Path, *overrides: str) -> Config:
    return compose_config(
        CONFIGS,
        "tiny",
        [
            *("train.steps=3", "run_dir=run", "data.path=train.jsonl", "data.eval_path=held.jsonl"),
            "+reward.terms.mine={kind: custom, weight: 0.1, function: 'scorer:score'}",
            "+reward.terms.clip_score={weight: 0.1, clip_weights: weights.safetensors}",
            *("loss=custom", "loss.function=objective.py:loss"),
            "model.start_from=start/checkpoints/step-000001",
            *overrides,
        ],
    )


def describe(config: Config) -> Provenance:
    paths = (config.data.eval_path, config.data.path)
    held_out, training = (load_prompts(path, height=32, width=32) for path in paths)
    model = find_model("tiny")
    if config.model.path != "tiny":
        model = dataclasses.replace(model, path=config.model.path)
    return describe_provenance(config, model, held_out=held_out, training=training)


def begin(*overrides: str) -> None:
    """A run that saved step 2."""
    config = compose(*overrides)
    opened = open_run(config)
    keep_provenance(opened.folder, describe(config), config, done=None)
    opened.folder.metrics_path.write_text('{"step": 2}\n')
    save_checkpoint(opened.folder, step=2, tensors=TENSORS, metadata=STATE)
    opened.lock.release()


def resume(
    *overrides: str, provenance: Callable[[Provenance], Provenance] = lambda each: each
) -> OpenedRun:
    config = compose("train.resume=run", *overrides)
    opened = open_run(config)
    try:
        done = None if opened.checkpoint is None else opened.checkpoint.step
        keep_provenance(opened.folder, provenance(describe(config)), config, done=done)
    finally:
        opened.lock.release()
    return opened


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def append_prompt(folder: Path) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write('\n{"prompt": "another \\"B\\""}')


def train_the_start_again(folder: Path) -> None:
    tensors = {"policy": {"a": torch.zeros(2)}}
    save_checkpoint(RunFolder(folder / "start"), step=1, tensors=tensors, metadata=STATE)


CHANGES: list[tuple[Change, str]] = [
    (append_prompt, r"data\.path = \S+train\.jsonl: .*00002"),
    (
        lambda folder: (folder / "train.png").write_bytes((folder / "held.png").read_bytes()),
        r"data\.path = \S+: .*00000, 00001",
    ),
    (
        lambda folder: (folder / "scorer.py").write_text(f"import scaling\n{SCORER}\n# sharper"),
        r"reward\.terms\.mine\.function = scorer:score: ",
    ),
    (
        lambda folder: (folder / "scaling.py").write_text("FACTOR = 2"),
        r"reward\.terms\.mine\.function = scorer:score: .*scaling",
    ),
    (
        lambda folder: (folder / "objective.py").write_text("def loss(inputs): return 0\n"),
        r"loss\.function = objective\.py:loss: ",
    ),
    (
        lambda folder: (folder / "weights.safetensors").write_bytes(b"others!"),
        r"reward\.terms\.clip_score\.clip_weights = \S+weights\.safetensors: ",
    ),
    (train_the_start_again, r"model\.start_from = \S+/start/checkpoints/step-000001: "),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_a_change_is_refused_or_noted(
    change: Change, said: str, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin("run.notes=mine")
    before = read_provenance(RunFolder(project / "run"))
    assert before is not None
    change(project)

    with pytest.raises(CheckpointError, match=f"{said}.*train.resume_with_changes=true"):
        resume()

    folder = resume("train.resume_with_changes=true").folder
    (warning,) = warnings(caplog)
    assert re.search(f"step 2: {said}", warning)
    notes = read_config(folder).run.notes
    assert notes == f"mine\n{warning}"
    after = read_provenance(folder)
    assert after is not None
    # Only terms score in another way.
    assert after.changed == before.changed_in(after)
    assert bool(after.changed) is said.startswith("reward")
    mixed = describe_mixed_scores(folder)
    assert mixed.startswith(tuple(after.changed)) if after.changed else not mixed
    # Said once: this is now what the run is trained with.
    resume()
    assert read_config(folder).run.notes == notes
    assert read_provenance(folder) == after


def test_a_change_is_noted_even_if_the_notes_are_full(project: Path) -> None:
    begin(f"run.notes={'n' * 4_990}")
    append_prompt(project)
    notes = read_config(resume("train.resume_with_changes=true").folder).run.notes
    assert notes is not None
    assert "00002" in notes
    assert notes.startswith("nnn")


def test_a_start_that_cannot_be_compared_is_refused(project: Path) -> None:
    begin()
    (project / "start").rename(project / "moved")
    # Gone, but the same as the run was given.
    resume()
    (project / "another").mkdir()
    before = (project / "run/config.yaml").read_text()
    with pytest.raises(CheckpointError, match=r"model\.start_from = /\S+/another: .*/\S+/start"):
        resume(
            "model.start_from=another", "train.resume_with_changes=true", provenance=without_start
        )
    assert (project / "run/config.yaml").read_text() == before


def without_start(provenance: Provenance) -> Provenance:
    """As `pin_start` names a checkpoint that the given run does not have."""
    files = {key: each for key, each in provenance.files.items() if key != "model.start_from"}
    return dataclasses.replace(provenance, files=files)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda folder: (folder / "held.jsonl").write_text('{"prompt": "a 0 \\"A\\""}'),
            r"removed \(00001\), .*changed \(00000\)",
        ),
        (
            lambda folder: (folder / "held.png").write_bytes((folder / "train.png").read_bytes()),
            r"changed \(00000, 00001\)",
        ),
    ],
)
def test_other_held_out_prompts_are_always_refused(
    change: Change, said: str, project: Path
) -> None:
    begin()
    change(project)
    with pytest.raises(CheckpointError, match=rf"data\.eval_path = .*{said}.*glm-grpo eval "):
        resume("train.resume_with_changes=true")


FILES = {
    "data.path": "train.jsonl",
    "data.eval_path": "held.jsonl",
    "model.start_from": "start/checkpoints/step-000001",
    "reward.terms.clip_score.clip_weights": "weights.safetensors",
}


def test_a_run_of_a_version_without_metadata_is_resumed(project: Path) -> None:
    for name in ("train", "held"):
        (project / f"{name}.jsonl").write_text('{"prompt": "a 0", "level": 1}\n{"prompt": "a 1"}')
    begin()
    begun = read_provenance(RunFolder(project / "run"))
    assert begun is not None

    def old(digests: Digests) -> Digests:
        return {name: each.partition("-")[0] for name, each in digests.items()}

    before = dataclasses.replace(begun, held_out=old(begun.held_out), training=old(begun.training))
    write_provenance(RunFolder(project / "run"), before)
    resume()
    # Now they are known.
    (project / "train.jsonl").write_text('{"prompt": "a 0", "level": 2}\n{"prompt": "a 1"}')
    with pytest.raises(CheckpointError, match=r"train\.jsonl: 1 changed \(00000\)"):
        resume()


def test_a_run_keeps_where_its_files_are(project: Path) -> None:
    begin()
    stored = flatten(read_config(RunFolder(project / "run")).model_dump())
    for key, path in FILES.items():
        assert stored[key] == str(project / path)
    # A tag that open_clip knows.
    assert stored["reward.terms.clip_score.clip_model"] == "ViT-L-14-quickgelu"


def test_the_functions_of_a_run_are_found_from_any_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin()
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    config = read_config(RunFolder(project / "run"))
    for module in ("scorer", "objective"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    config.reward.terms["mine"].check()
    assert isinstance(config.loss, CustomLoss)
    config.loss.load()
    stored = read_provenance(RunFolder(project / "run"))
    assert stored is not None
    assert describe(config).code == stored.code


def test_the_code_of_a_detector_belongs_to_what_a_run_began_with(project: Path) -> None:
    detector = "{weight: 0.1, detector: 'scorer.py:detect', clip_weights: null}"
    config = compose(f"+reward.terms.composition={detector}")
    assert flatten(config.model_dump())["reward.terms.composition.folder"] == str(project)
    code = describe(config).code
    (project / "scorer.py").write_text("def detect(pixels, classes): return [[]] * len(pixels)\n")
    assert code["reward.terms.composition.detector"]
    assert (
        code["reward.terms.composition.detector"]
        != (describe(config).code["reward.terms.composition.detector"])
    )


def test_files_may_be_moved_but_not_exchanged(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin()
    moved = project.with_name("moved")
    project.rename(moved)
    monkeypatch.chdir(moved)
    resume()
    stored = flatten(read_config(RunFolder(moved / "run")).model_dump())
    assert {key: stored[key] for key in FILES} == {
        key: str(moved / path) for key, path in FILES.items()
    }
    # A folder in which files of the same names have other contents.
    elsewhere = moved / "elsewhere"
    shutil.copytree(moved, elsewhere, ignore=shutil.ignore_patterns("run", "elsewhere"))
    append_prompt(elsewhere)
    monkeypatch.chdir(elsewhere)
    config = compose(f"train.resume={moved / 'run'}")
    opened = open_run(config)
    with pytest.raises(CheckpointError, match=rf"data\.path = {elsewhere}/train\.jsonl: .*00002"):
        keep_provenance(opened.folder, describe(config), config, done=2)
    opened.lock.release()


def test_an_evaluation_says_what_is_not_as_in_the_run(project: Path) -> None:
    begin()
    append_prompt(project)
    (project / "objective.py").write_text("def loss(inputs): return 0\n")
    (project / "held.png").write_bytes((project / "train.png").read_bytes())
    found = find_checkpoint(project / "run")

    def changes(config: Config) -> list[str]:
        held_out = load_prompts(config.data.eval_path, height=32, width=32)
        return changes_since(
            found,
            config,
            describe_provenance(config, find_model("tiny"), held_out=held_out, training=None),
        )

    code, held_out = changes(found.config)
    assert re.search(rf"{project / 'run'}: loss\.function = objective\.py:loss: ", code)
    assert re.search(rf"data\.eval_path = {project / 'held.jsonl'}: .*00000, 00001", held_out)
    # Other prompts were asked for.
    assert changes(with_absolute_paths(compose("data.eval_path=train.jsonl"))) == [code]


def test_other_versions_are_noted(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin()

    def upgrade(provenance: Provenance) -> Provenance:
        versions = {**provenance.versions, "torch": "9.0", "pillow": "8.0"}
        return dataclasses.replace(provenance, versions=versions)

    now = describe(compose()).versions
    resume(provenance=upgrade)
    (warning,) = warnings(caplog)
    for name, other in (("pillow", "8.0"), ("torch", "9.0")):
        assert re.search(rf"{name} {other} .*{re.escape(now[name])}", warning)


def test_a_run_without_a_checkpoint_begins_anew_with_what_is_there(project: Path) -> None:
    config = compose()
    opened = open_run(config)
    keep_provenance(opened.folder, describe(config), config, done=None)
    opened.lock.release()
    append_prompt(project)
    resume()
    stored = read_provenance(RunFolder(project / "run"))
    assert stored is not None
    assert [*stored.training] == ["00000", "00001", "00002"]


def test_a_model_of_the_hub_is_known_by_its_revision(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(project / "hub"))
    config = compose("model.path=owner/model", "model.start_from=null")
    assert "model.path" not in describe(config).files
    repository = project / "hub/models--owner--model"
    for name, content in {"refs/main": "abc", "snapshots/abc/config.json": "{}"}.items():
        (repository / name).parent.mkdir(parents=True)
        (repository / name).write_text(content)
    assert describe(config).files["model.path"] == "abc"


def test_an_extended_run_keeps_its_new_length(project: Path) -> None:
    steady = ("optim.schedule=constant", "optim.warmup_steps=0")
    begin(*steady)
    resume(*steady, "train.steps=5")
    assert read_config(RunFolder(project / "run")).train.steps == 5


def test_a_resumed_run_shows_scores_by_the_new_column(project: Path) -> None:
    begin()
    resume("eval.group_by=kind")
    assert read_config(RunFolder(project / "run")).eval.group_by == "kind"


def test_a_scorer_may_have_moved_and_is_then_found_by_evaluations(project: Path) -> None:
    judge = "+reward.terms.vlm_judge={weight: 0.1, model: m, url: 'http://127.0.0.1:1/v1'}"
    begin(judge)
    resume(judge.replace(":1/", ":2/"), "+reward.terms.vlm_judge.retries=5")
    after = flatten(read_config(RunFolder(project / "run")).model_dump())
    assert after["reward.terms.vlm_judge.url"] == "http://127.0.0.1:2/v1"
    assert after["reward.terms.vlm_judge.retries"] == 5


def test_another_scorer_behind_an_address_is_refused(project: Path) -> None:
    def tell(name: str, digest: str) -> Reply:
        info = {"protocol": 1, "name": name, "needs": ["prompt"], "digest": digest}
        return Reply(body=json.dumps(info).encode())

    with answering(lambda _: None, to_get=tell("level", "11")) as endpoint:
        remote = f"+reward.terms.remote={{weight: 0.1, url: '{endpoint.url}'}}"
        begin(remote)
        resume(remote)
    for name, digest in (("level", "12"), ("another", "11")):
        with (
            answering(lambda _: None, to_get=tell(name, digest)) as endpoint,
            pytest.raises(CheckpointError, match=rf"{name} \({digest}\).* level \(11\)"),
        ):
            resume(f"+reward.terms.remote={{weight: 0.1, url: '{endpoint.url}'}}")


def test_auto_resumes_the_run_that_began_last(project: Path) -> None:
    """The clock was put back by an hour between two runs."""
    for time, began in (("01-50-00", "00:50:00"), ("01-10-00", "01:10:00")):
        config = compose(f"run_dir=outputs/2026-10-25/{time}")
        opened = open_run(config)
        provenance = dataclasses.replace(describe(config), began=f"2026-10-25T{began}+00:00")
        keep_provenance(opened.folder, provenance, config, done=None)
        opened.lock.release()
        # Written in the other order, as by a copy.
        os.utime(opened.folder.config_path, (1e9, 1e9 if time < "01-30" else 2e9))
    opened = open_run(compose("run_dir=outputs/2026-10-25/02-00-00", "train.resume=auto"))
    assert opened.folder.path.name == "01-10-00"


def test_origin_names_held_out_prompts_that_were_trained_on_and_all_devices(project: Path) -> None:
    # Their target is another one.
    rows = ('{"prompt": "a 0 \\"A\\""}', '{"prompt": "another \\"B\\""}', '{"prompt": "new"}')
    (project / "held.jsonl").write_text("\n".join(rows))
    begin()
    folder = RunFolder(project / "run")
    resume(provenance=lambda each: dataclasses.replace(each, devices="2 x A100"))
    resume(provenance=lambda each: dataclasses.replace(each, devices="2 x A100"))
    assert read_provenance(folder).shared == ("00000",)
    append_prompt(project)
    changed = "train.resume_with_changes=true"
    resume(changed, provenance=lambda each: dataclasses.replace(each, devices="H200"))
    provenance = read_provenance(folder)
    assert provenance.shared == ("00000", "00001")
    assert provenance.devices == "2 x A100; H200"
    write_provenance(folder, dataclasses.replace(provenance, shared=None))
    resume(changed)
    assert read_provenance(folder).shared is None
