"""A checkpoint that is cut short, or of another model, is refused before anything is loaded from it."""

from pathlib import Path

import pytest
import torch
import transformers
from small_runs import gpt2, run, trainer

from bareloop.trainer.checkpoint_error import CheckpointError

pytestmark = pytest.mark.usefixtures("frozen_heap")

CUT = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def test_a_checkpoint_that_is_cut_short_is_refused_and_a_whole_one_named(tmp_path: Path) -> None:
    run(tmp_path, save_steps=5)
    last, whole = tmp_path / "checkpoint-10", tmp_path / "checkpoint-5"
    for name in CUT:
        content = (last / name).read_bytes()
        for size in (len(content) * 2 // 3, 0):
            (last / name).write_bytes(content[:size])
            made = trainer(tmp_path, model=gpt2())
            before = {key: value.clone() for key, value in made.model.state_dict().items()}
            with pytest.raises(CheckpointError) as caught:
                made.train(resume_from_checkpoint=True)
            assert f"{last} is not a whole checkpoint: {name} " in str(caught.value)
            assert f"Whole beside it: {whole}" in str(caught.value)
            assert all(torch.equal(before[key], value) for key, value in made.model.state_dict().items())
        (last / name).write_bytes(content)
    (last / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is there without"):
        run(tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="there is no folder"):
        run(tmp_path, resume=str(tmp_path / "checkpoint-7"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run(tmp_path, save_steps=10)
    with pytest.raises(
        CheckpointError, match=r"another model: transformer\.wte\.weight is \[128, 16\] there and \[128, 32\] here"
    ):
        run(tmp_path, resume=True, model=gpt2(width=32))
    with pytest.raises(CheckpointError, match=r"another model: transformer\.h\.1\..* is not there"):
        run(tmp_path, resume=True, model=gpt2(layers=2))
    bert = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=128
    )
    with pytest.raises(CheckpointError, match=r"another model: .* is not there; and \d+ more"):
        run(tmp_path, resume=True, model=transformers.BertForMaskedLM(bert))
    with pytest.raises(CheckpointError, match="does not fit this optimizer or scheduler"):
        frozen = gpt2()
        frozen.transformer.h.requires_grad_(False)
        run(tmp_path, resume=True, model=frozen)
