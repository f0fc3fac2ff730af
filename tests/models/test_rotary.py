"""Feedback positions: nothing changes outside the range, bit for bit; inside it their own base counts from zero."""

from __future__ import annotations

import pytest
import torch
from test_backbone import architectures
from transformers import AutoModelForCausalLM as Auto

from agentft.models.backbone import decoder_of, hidden_states
from agentft.models.rotary import FeedbackRotary, install

START = 10000


@pytest.mark.parametrize("name", list(architectures()))
def test_sequences_without_feedback_are_bit_equal(name: str) -> None:
    model = Auto.from_config(architectures()[name]).eval()
    ids, positions = torch.randint(0, 96, (2, 17)), torch.arange(17).expand(2, -1)
    plain = hidden_states(model, ids, positions)
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert install(model, START, 5000.0) == (2 if name == "gemma3_text" else 1), "Gemma has one for each kind of layer"
    assert torch.equal(hidden_states(model, ids, positions), plain)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), generated)


@pytest.mark.parametrize("name", list(architectures()))
def test_inside_the_range_angles_follow_the_own_base_from_zero(name: str) -> None:
    config = architectures()[name]
    base = config.rope_theta
    rotary = decoder_of(Auto.from_config(config)).rotary_emb
    wrapped = FeedbackRotary(rotary, START, base)
    x, own = torch.zeros(1, 4, 8), torch.tensor([[0, 1, 5, 9]])
    cos, sin = wrapped(x, own + START)
    if name != "kimi_k2":  # plain frequencies: the same base must give the plain module's angles
        torch.testing.assert_close((cos, sin), rotary(x, own))
    other = FeedbackRotary(rotary, START, base * 10)(x, own + START)[0]
    assert cos.shape == rotary(x, own)[0].shape, "partial rotary keeps its number of frequencies"
    assert torch.equal(other[:, 0], cos[:, 0])
    assert not torch.allclose(other[:, 3], cos[:, 3])


def test_plain_tokens_keep_their_angles_beside_feedback_tokens() -> None:
    rotary = Auto.from_config(architectures()["glm"]).base_model.rotary_emb
    wrapped = FeedbackRotary(rotary, START, 500.0)
    mixed = torch.tensor([[0, 1, START, START + 1, 2]])
    got, plain = wrapped(torch.zeros(1, 5, 8), mixed), rotary(torch.zeros(1, 3, 8), torch.tensor([[0, 1, 2]]))
    for mixed_part, plain_part in zip(got, plain, strict=True):
        assert torch.equal(mixed_part[:, [0, 1, 4]], plain_part)


def test_nothing_is_added_to_a_checkpoint() -> None:
    model = Auto.from_config(architectures()["llama"])
    names = set(model.state_dict())
    install(model, START, 500.0)
    assert set(model.state_dict()) == names
    assert install(model, START, 500.0) == 0, "a second call wraps nothing again"
