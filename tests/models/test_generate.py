from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GlmConfig, GlmForCausalLM, PreTrainedModel

from agentft.models import rotary
from agentft.models.generate import Prompt, sample_turns
from agentft.models.routing import HeadTap, Route, ToolLogitsProcessor

VOCAB, START = 97, 500


def _glm() -> PreTrainedModel:
    return GlmForCausalLM(
        GlmConfig(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=12, pad_token_id=0, eos_token_id=1, initializer_range=0.3,
        )
    )  # fmt: skip


def _kimi() -> PreTrainedModel:
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
            topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
            first_k_dense_replace=1, pad_token_id=0, eos_token_id=1, initializer_range=0.3,
        )
    )  # fmt: skip


@pytest.fixture(params=["glm", "kimi"])
def backbone(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(3)
    model = {"glm": _glm, "kimi": _kimi}[request.param]().eval()
    assert rotary.install(model, START, 5000.0) > 0
    return model


def prompts() -> list[Prompt]:
    """Rows of three lengths; one holds a result in the feedback range, so that its positions jump there and back."""
    generator = np.random.default_rng(5)
    plain = [np.arange(4), np.arange(19)]
    told = np.concatenate([np.arange(6), START + np.arange(5), np.arange(6, 9)])
    return [
        Prompt(
            input_ids=generator.integers(2, VOCAB, len(positions)).astype(np.int32),
            position_ids=positions.astype(np.int32),
            next_position=int(positions[positions < START][-1]) + 1,
        )
        for positions in (*plain, told)
    ]


def greedy(backbone: PreTrainedModel, rows: list[Prompt], **options: object) -> list[tuple[int, ...]]:
    turns = sample_turns(backbone, rows, stop_ids=(1,), max_new_tokens=24, temperature=0.0, **options)  # type: ignore[arg-type]
    return [turn.ids for turn in turns]


def test_the_cache_changes_no_token(backbone: PreTrainedModel) -> None:
    assert greedy(backbone, prompts()) == greedy(backbone, prompts(), use_cache=False)


def test_a_batch_equals_its_rows_one_by_one(backbone: PreTrainedModel) -> None:
    assert greedy(backbone, prompts()) == [greedy(backbone, [row])[0] for row in prompts()]


def test_a_turn_equals_plain_forward_passes(backbone: PreTrainedModel) -> None:
    """No padding, no cache, positions and mask written out: the definition of greedy decoding."""
    row = prompts()[2]
    ids, positions = row.input_ids.tolist(), row.position_ids.tolist()
    turn = sample_turns(backbone, [row], stop_ids=(1,), max_new_tokens=8, temperature=0.0)[0]
    for step, token in enumerate(turn.ids):
        size = len(ids)
        mask = torch.full((1, 1, size, size), torch.finfo(torch.float32).min).triu(1)
        with torch.no_grad():
            logits = backbone(
                input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), attention_mask=mask
            ).logits[0, -1]
        assert int(logits.argmax()) == token
        assert float(torch.log_softmax(logits, -1)[token]) == pytest.approx(float(turn.logprobs[step]), abs=1e-4)
        ids, positions = [*ids, token], [*positions, row.next_position + step]


def test_a_turn_ends_with_its_stop_token(backbone: PreTrainedModel) -> None:
    free = greedy(backbone, prompts())
    stop = free[0][3]
    turns = sample_turns(backbone, prompts(), stop_ids=(stop,), max_new_tokens=24, temperature=0.0)
    for turn, ids in zip(turns, free, strict=True):
        cut = ids.index(stop) + 1 if stop in ids else len(ids)
        assert turn.ids == ids[:cut]
        assert turn.stopped == (stop in ids)
        assert turn.logprobs.shape == (cut,)


def test_one_seed_one_sample_and_the_global_state_stays(backbone: PreTrainedModel) -> None:
    def sample(seed: int) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(seed)
        turns = sample_turns(backbone, prompts(), stop_ids=(1,), max_new_tokens=12, generator=generator)
        return [turn.ids for turn in turns]

    before = torch.get_rng_state()
    first = sample(11)
    assert first == sample(11)
    assert first != sample(12)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_follow_the_distribution(backbone: PreTrainedModel) -> None:
    row = prompts()[0]
    size = len(row.input_ids)
    mask = torch.full((1, 1, size, size), torch.finfo(torch.float32).min).triu(1)
    with torch.no_grad():
        logits = backbone(
            input_ids=torch.tensor(row.input_ids[None].astype(np.int64)),
            position_ids=torch.tensor(row.position_ids[None].astype(np.int64)),
            attention_mask=mask,
        ).logits[0, -1]
    expected = torch.softmax(logits / 0.7, -1)
    turns = sample_turns(
        backbone, [row] * 2000, stop_ids=(), max_new_tokens=1, temperature=0.7, generator=torch.Generator()
    )
    counts = torch.bincount(torch.tensor([turn.ids[0] for turn in turns]), minlength=VOCAB) / 2000
    assert float((counts - expected).abs().sum()) < 0.25
    likely = int(expected.argmax())
    assert float(counts[likely]) == pytest.approx(float(expected[likely]), abs=0.04)


def test_a_processor_sees_the_row_so_far_and_rules(backbone: PreTrainedModel) -> None:
    seen: list[list[int]] = []

    def only_even(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append(ids[1].tolist())
        return logits.masked_fill(torch.arange(logits.shape[-1]) % 2 == 1, -torch.inf)

    ids = greedy(backbone, prompts(), processor=only_even)
    assert all(token % 2 == 0 for row in ids for token in row)
    assert seen[-1] == [*prompts()[1].input_ids.tolist(), *ids[1][:-1]]


def test_the_tool_router_holds_sampled_calls_to_its_route(backbone: PreTrainedModel) -> None:
    """An untrained model names no tool by itself; behind the tool-start token the route lets it say nothing else."""
    names = {"read": (40, 41), "edit": (42,), "publish": (43, 44)}
    head = torch.nn.Linear(48, 3)
    row = prompts()[0]
    row = replace(row, input_ids=np.append(row.input_ids, 7).astype(np.int32),
                  position_ids=np.append(row.position_ids, row.next_position).astype(np.int32),
                  next_position=row.next_position + 1)  # fmt: skip
    route = Route(allowed=frozenset({"read", "edit"}))
    with HeadTap(backbone, head) as tap:
        processor = ToolLogitsProcessor(names, tool_start_id=7, args_id=8, routes=route, tap=tap)
        turns = sample_turns(
            backbone,
            [row] * 40,
            stop_ids=(8,),
            max_new_tokens=6,
            temperature=8.0,
            generator=torch.Generator(),
            processor=processor,
        )
    assert {turn.ids for turn in turns} == {(40, 41, 8), (42, 8)}


def test_sampling_without_a_generator_is_refused(backbone: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="generator"):
        sample_turns(backbone, prompts(), stop_ids=(1,), max_new_tokens=2)
    assert sample_turns(backbone, [], stop_ids=(1,), max_new_tokens=2, temperature=0.0) == []
