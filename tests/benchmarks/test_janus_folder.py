"""A folder with random weights is one that the project loads, and whose gap can be measured."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import janus_folder, replay_gap
from benchmarks.full_size.janus_pro import _small_sizes
from glm_grpo.models.janus_pro.loading import check_model, load_pipeline
from glm_grpo.models.janus_pro.prompt_inputs import encode_prompts, special_ids
from tests.janus_miniature import TEMPLATE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_folder_is_a_model_with_the_ids_of_its_config(tmp_path, dtype, capsys) -> None:
    values = _small_sizes().to_dict() | {"image_token_id": 1005}
    ids = {"bos_token_id": 1000, "eos_token_id": 1001, "pad_token_id": 1002}
    values["text_config"] |= ids | {"vocab_size": 1010}
    config, template, folder = tmp_path / "c.json", tmp_path / "t.jinja", tmp_path / "model"
    config.write_text(json.dumps(values))
    template.write_text(TEMPLATE)
    janus_folder.main(
        [*map(str, (config, template, folder)), "--dtype", dtype, "--side", "2", "--spread", "3"]
    )
    check_model(str(folder))
    parts = load_pipeline(str(folder), dtype=torch.float32)
    found = special_ids(parts.model, parts.processor)
    assert (found.begin, found.pad, found.image) == (1000, 1002, 1006)
    inputs = encode_prompts(parts.processor, ["a cat"], found)
    assert inputs.input_ids[0, -1] == 1006
    inner = parts.model.model
    assert inner.config.vision_config.num_image_tokens == 4
    states = torch.randn(500, inner.config.text_config.hidden_size)
    with torch.no_grad():
        assert inner.generation_head(states).std().item() == pytest.approx(3, rel=0.2)
    replay_gap.main([str(folder), "--dtypes", "float32"])
    lines = capsys.readouterr().out.splitlines()
    # The head's last map in float32 changes nothing of a model in float32.
    assert [line.split(": mean ")[1][:6] for line in lines[1:-1]] == ["0.0000"] * 3
