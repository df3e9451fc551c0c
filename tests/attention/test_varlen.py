import inspect
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache_hf.attention import varlen
from vlcache_hf.attention.sdpa import SdpaAttention
from vlcache_hf.attention.varlen import VarlenAttention


def fake_varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """What torch documents of its function and checks in it, for causal calls with a block table."""
    assert window_size == (-1, 0) and all(type(length) is int for length in (max_q, max_k))
    assert enable_gqa or query.shape[1] == key.shape[2]
    for tensor in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert tensor is None or tensor.dtype == torch.int32 and tensor.is_contiguous()
    assert block_table.shape == (len(seqused_k), -(-max_k // key.shape[1]))
    assert 0 <= block_table.min() and block_table.max() < key.shape[0]
    assert cu_seq_q[-1] == query.shape[0] and (cu_seq_q.diff().max(), seqused_k.max()) == (max_q, max_k)
    assert cu_seq_k is None or torch.equal(cu_seq_k.diff(), seqused_k)
    output = torch.full_like(query, torch.nan)
    for i, kv_len in enumerate(seqused_k.tolist()):
        for at in range(cu_seq_q[i], cu_seq_q[i + 1]):
            seen = kv_len - (cu_seq_q[i + 1] - at) + 1
            positions = torch.arange(seen)
            pages, offsets = block_table[i, positions // key.shape[1]].long(), positions % key.shape[1]
            groups = query.shape[1] // key.shape[2]
            keys, values = (pool[pages, offsets].repeat_interleave(groups, 1) for pool in (key, value))
            weights = (torch.einsum("hd,khd->hk", query[at], keys) * scale).softmax(-1)
            output[at] = torch.einsum("hk,khd->hd", weights, values)
    return output


@pytest.fixture
def fresh_search():
    varlen.find_kernel.cache_clear()
    yield
    varlen.find_kernel.cache_clear()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_matches_sdpa(cases, data):
    case = data.draw(cases(page_sizes=(4, 16, 256)))
    attention = VarlenAttention(fake_varlen_attn)
    # The page size is the kernel's; smaller ones make a row of several pages cheap here.
    attention.page_size = next(size for size in (256, 16, 4) if case.key_pool.shape[1] % size == 0)
    torch.testing.assert_close(case.run(attention), case.run(SdpaAttention()), rtol=0, atol=2e-6)


def test_matches_sdpa_in_pages_of_256(make_case, nested):
    case = make_case(nested, page_size=256)
    attention = VarlenAttention(fake_varlen_attn)
    torch.testing.assert_close(case.run(attention), case.run(SdpaAttention()), rtol=0, atol=2e-6)


@pytest.mark.parametrize("active, passed", [(None, True), ("FA3", False)])
def test_key_offsets_are_withheld_from_other_kernels(make_case, nested, monkeypatch, active, passed):
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active)
    given_offsets = []

    def kernel(query, key, value, cu_seq_q, cu_seq_k, *args, **kwargs):
        given_offsets.append(cu_seq_k is not None)
        return query

    make_case(nested, page_size=256).run(VarlenAttention(kernel))
    assert given_offsets == [passed]


def test_no_other_kernel_where_torch_cannot_replace_it(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "current_flash_attention_impl", raising=False)
    assert varlen._replaced_kernel() is None


@pytest.mark.parametrize("parameter", ["block_table", "other"])
def test_block_table_is_detected(monkeypatch, fresh_search, parameter):
    def varlen_attn(query, **kwargs): ...

    names = ["query", parameter]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    varlen_attn.__signature__ = inspect.Signature(parameters)
    monkeypatch.setattr(varlen.importlib, "import_module", lambda name: types.SimpleNamespace(varlen_attn=varlen_attn))
    kernel, problem = varlen.find_kernel()
    if parameter == "block_table":
        assert kernel is varlen_attn and problem == ""
    else:
        assert kernel is None and "takes no `block_table`; upgrade to torch >= 2.12" in problem


def test_torch_without_varlen(monkeypatch, fresh_search):
    def import_module(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(varlen.importlib, "import_module", import_module)
    kernel, problem = varlen.find_kernel()
    assert kernel is None and "No module named 'torch.nn.attention.varlen'" in problem and "upgrade" in problem


@pytest.mark.skipif(varlen.find_kernel()[0] is None, reason="torch without `block_table`")
def test_installed_function_takes_what_is_passed(make_case, nested):
    kernel, _ = varlen.find_kernel()
    case = make_case(nested, page_size=256)
    assert case.run(VarlenAttention(kernel), torch.bfloat16, "meta").is_meta


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim, groups", [(64, 1), (128, 4)])
def test_real_kernel(make_case, nested, dtype, head_dim, groups):
    kernel, problem = varlen.find_kernel()
    if kernel is None:
        pytest.skip(problem)
    case = make_case(nested, page_size=256, head_dim=head_dim, groups=groups)
    output = case.run(VarlenAttention(kernel), dtype, "cuda").cpu().double()
    torch.testing.assert_close(output, case.expected(), rtol=0, atol=3e-2)
