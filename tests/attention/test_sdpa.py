import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from vlcache_hf.attention import sdpa
from vlcache_hf.attention.sdpa import SdpaAttention
from vlcache_hf.plan import Segment


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_matches_reference(cases, data):
    case = data.draw(cases())
    torch.testing.assert_close(case.run(SdpaAttention()).double(), case.expected(), rtol=0, atol=1e-6)
    torch.testing.assert_close(case.run(SdpaAttention(), torch.float64), case.expected(), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_small_chunks_match_reference(cases, data):
    case = data.draw(cases())
    chunk, elements = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([1, 100, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "MAX_CHUNK", chunk)
        patch.setattr(sdpa, "MAX_MASK_ELEMENTS", elements)
        patch.setattr(sdpa, "_fused_causal", lambda *_: False)
        output = case.run(SdpaAttention())
    torch.testing.assert_close(output.double(), case.expected(), rtol=0, atol=1e-6)


def test_fp32_error_is_below_1e6(make_case, nested):
    case = make_case(nested, head_dim=64)
    torch.testing.assert_close(case.run(SdpaAttention()).double(), case.expected(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_plain_sdpa(make_case, dtype):
    case = make_case([Segment(0, 60, 300), Segment(0, 300, 300)], head_dim=64)
    exact = case.expected()
    queries, keys, values = case.query[:, :, 60:], case.key_pool[:, :300], case.value_pool[:, :300]
    plain = scaled_dot_product_attention(
        queries.to(dtype),
        keys.transpose(1, 2).repeat_interleave(2, 1).to(dtype),
        values.transpose(1, 2).repeat_interleave(2, 1).to(dtype),
        is_causal=True,
        scale=case.scaling,
    ).transpose(1, 2)
    allowed = 1.2 * (plain.double() - exact[:, 60:]).abs().max()
    output = case.run(SdpaAttention(), dtype)
    assert (output.double() - exact).abs().max() <= allowed


def test_keys_are_neither_copied_nor_repeated(make_case, nested, monkeypatch):
    case = make_case([*nested, Segment(1, 256, 256)])
    pools = {pool.untyped_storage().data_ptr() for pool in (case.key_pool, case.value_pool)}
    calls = []

    def spy(query, key, value, **kwargs):
        assert {tensor.untyped_storage().data_ptr() for tensor in (key, value)} <= pools
        calls.append((kwargs.get("is_causal", False), kwargs.get("attn_mask") is not None))
        return scaled_dot_product_attention(query, key, value, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)
    case.run(SdpaAttention(), torch.float64)
    causal, masked, single = (True, False), (False, True), (False, False)
    assert calls == [causal, masked, single, masked, causal]


def test_one_mask_per_plan_and_device(make_case, nested):
    case, scratch = make_case(nested), {}
    case.run(SdpaAttention(), scratch=scratch)
    ((key, mask),) = scratch.items()
    assert torch.device("cpu") in key and mask.shape == (40, 2, 513)
    case.run(SdpaAttention(), scratch=scratch)
    assert scratch[key] is mask and len(scratch) == 1


def test_no_mask_without_need(make_case):
    scratch = {}
    make_case([Segment(0, 1, 9), Segment(0, 9, 9), Segment(0, 1, 0)]).run(SdpaAttention(), scratch=scratch)
    assert scratch == {}


def test_grouped_causal_on_cuda_depends_on_the_flash_kernel(monkeypatch):
    class Query:
        device, shape = torch.device("cuda"), (1, 4, 3, 8)

    class Key:
        shape = (1, 2, 3, 8)

    class SameHeads:
        shape = Query.shape

    asked = []
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *arguments: arguments)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: asked.append(params) or False)
    assert sdpa._fused_causal(Query, SameHeads, SameHeads) and not asked
    assert not sdpa._fused_causal(Query, Key, Key)
    assert asked == [(Query, Key, Key, None, 0.0, True, True)]


def test_segments_that_do_not_fit_are_refused(make_case):
    case = make_case([Segment(0, 2, 4)])
    with pytest.raises(ValueError, match="3 queries in all, but 2 are packed"):
        SdpaAttention()(case.query, case.key_pool, case.value_pool, (Segment(0, 3, 4),), 1.0, {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_on_gpu(make_case, nested, dtype, tolerance):
    case = make_case([*nested, Segment(1, 256, 256)], head_dim=64)
    output = case.run(SdpaAttention(), dtype, "cuda").cpu().double()
    torch.testing.assert_close(output, case.expected(), rtol=0, atol=tolerance)
