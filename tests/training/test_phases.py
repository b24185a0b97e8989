from __future__ import annotations

import pytest
import torch

from glm_grpo.training.phases import PhaseClock


@pytest.mark.gpu
def test_clock_waits_for_the_work_of_its_phase_and_not_for_that_of_other_streams():
    beside, clock = torch.cuda.Stream(), PhaseClock()
    with torch.cuda.stream(beside):
        # Cycles: about two seconds.
        torch.cuda._sleep(4_000_000_000)
    with clock.phase("decode"):
        torch.cuda._sleep(200_000_000)
    assert torch.cuda.current_stream().query()
    assert not beside.query()
    torch.cuda.synchronize()
