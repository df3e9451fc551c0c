import logging
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache_hf.attention import flash
from vlcache_hf.attention.flash import FlashAttention
from vlcache_hf.attention.sdpa import SdpaAttention


def fake_flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    block_table=None,
):
    """What flash-attn 2 documents of its function, for causal calls with a block table."""
    assert causal and dropout_p == 0 and window_size == (-1, -1)
    assert all(type(value) is int for value in (max_seqlen_q, max_seqlen_k))
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (cu_seqlens_q, cu_seqlens_k))
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
    assert q.stride(-1) == 1 and k.is_contiguous() and v.is_contiguous()
    assert 0 <= block_table.min() and block_table.max() < k.shape[0]
    assert cu_seqlens_q[-1] == q.shape[0] and cu_seqlens_q.diff().min() > 0
    assert (cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max()) == (max_seqlen_q, max_seqlen_k)
    output = torch.full_like(q, torch.nan)
    for i, (start, stop) in enumerate(zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], strict=True)):
        length, kv_len = stop - start, cu_seqlens_k[i + 1] - cu_seqlens_k[i]
        keys, values = (pages[block_table[i].long()].flatten(0, 1)[:kv_len] for pages in (k, v))
        groups = q.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], keys.repeat_interleave(groups, 1)) * softmax_scale
        hidden = torch.ones(length, kv_len, dtype=torch.bool).triu(kv_len - length + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output[start:stop] = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(groups, 1))
    return output


@pytest.fixture
def fresh_search():
    flash.find_kernel.cache_clear()
    yield
    flash.find_kernel.cache_clear()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_matches_sdpa(cases, data):
    case = data.draw(cases(page_sizes=(4, 16, 256), max_kv=70))
    attention = FlashAttention(fake_flash_attn_varlen_func)
    # The page size is the kernel's; smaller ones make a row of several pages cheap here.
    attention.page_size = next(size for size in (256, 16, 4) if case.key_pool.shape[1] % size == 0)
    torch.testing.assert_close(case.run(attention), case.run(SdpaAttention()), rtol=0, atol=2e-6)


def test_matches_sdpa_in_pages_of_256(make_case, nested):
    case = make_case(nested, page_size=256)
    attention = FlashAttention(fake_flash_attn_varlen_func)
    torch.testing.assert_close(case.run(attention), case.run(SdpaAttention()), rtol=0, atol=2e-6)


def test_not_installed_is_not_worth_a_warning(monkeypatch, fresh_search, caplog):
    missing = ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")
    monkeypatch.setattr(flash.importlib, "import_module", raiser(missing))
    kernel, problem = flash.find_kernel()
    assert kernel is None and "not installed; run `pip install flash-attn" in problem
    assert not caplog.records


@pytest.mark.parametrize(
    "statement, told",
    [
        ("raise ImportError('undefined symbol: _ZN3c104cuda')", "ImportError: undefined symbol: _ZN3c104cuda"),
        ("raise OSError('libcudart.so.11.0: no such file')", "OSError: libcudart.so.11.0: no such file"),
        ("raise RuntimeError('built for torch 2.1')", "RuntimeError: built for torch 2.1"),
        ("import flash_attn_2_cuda_missing", "ModuleNotFoundError: No module named 'flash_attn_2_cuda_missing'"),
    ],
)
def test_broken_package_is_reported_once(tmp_path, monkeypatch, fresh_search, caplog, statement, told):
    install(tmp_path, monkeypatch, statement)
    with caplog.at_level(logging.WARNING, logger=flash.__name__):
        kernel, problem = flash.find_kernel()
        flash.find_kernel()
    assert kernel is None and told in problem and f"reinstall flash-attn for torch {torch.__version__}" in problem
    assert len(caplog.records) == 1 and told in caplog.text


@pytest.mark.parametrize("source", ["", "def flash_attn_varlen_func(q, k, v, cu_seqlens_q): ..."])
def test_too_old(tmp_path, monkeypatch, fresh_search, source):
    install(tmp_path, monkeypatch, f"__version__ = '2.0.4'\n{source}")
    kernel, problem = flash.find_kernel()
    assert kernel is None and "flash_attn 2.0.4 has no" in problem and "upgrade flash-attn" in problem


def test_usable_package_is_found(tmp_path, monkeypatch, fresh_search):
    install(tmp_path, monkeypatch, "def flash_attn_varlen_func(q, k, v, block_table=None): return 'called'")
    kernel, problem = flash.find_kernel()
    assert kernel is not None and kernel(1, 2, 3) == "called" and problem == ""


def install(folder, monkeypatch, source):
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "__init__.py").write_text(source)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.syspath_prepend(folder)
    # Restored afterwards: what a successful import leaves behind must not outlive the folder.
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def raiser(error):
    def import_module(name):
        raise error

    return import_module


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim, groups", [(64, 1), (128, 4)])
def test_real_kernel(make_case, nested, dtype, head_dim, groups):
    kernel, problem = flash.find_kernel()
    if kernel is None:
        pytest.skip(problem)
    case = make_case(nested, page_size=256, head_dim=head_dim, groups=groups)
    output = case.run(FlashAttention(kernel), dtype, "cuda").cpu().double()
    torch.testing.assert_close(output, case.expected(), rtol=0, atol=3e-2)
