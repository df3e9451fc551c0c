import pytest
import torch

from vlcache_hf.attention.pages import as_pages, build_layout, check_segments, paged_attention
from vlcache_hf.plan import Segment


def test_pages_are_views_of_the_pool():
    pool = torch.arange(2 * 8 * 3 * 5).view(2, 8, 3, 5)
    pages = as_pages(pool, 4)
    assert pages.shape == (4, 4, 3, 5) and pages.data_ptr() == pool.data_ptr()
    assert torch.equal(pages[3], pool[1, 4:])


def test_pool_must_hold_whole_pages():
    with pytest.raises(ValueError, match="holds 6 positions; pad it to a multiple of 4"):
        as_pages(torch.zeros(2, 6, 3, 5), 4)


def test_layout():
    segments = [Segment(1, 2, 5), Segment(0, 1, 0), Segment(1, 3, 12), Segment(0, 4, 4)]
    layout = build_layout(segments, pool_len=16, page_size=4, device="cpu")
    assert layout.cu_seqlens_q.tolist() == [0, 2, 5, 9]
    assert layout.cu_seqlens_k.tolist() == [0, 5, 17, 21]
    assert layout.seqused_k.tolist() == [5, 12, 4]
    # Both segments of row 1 read the same pages; entries behind a segment's last key stay inside its row.
    assert layout.block_table.tolist() == [[4, 5, 6], [4, 5, 6], [0, 1, 2]]
    assert (layout.max_q, layout.max_k) == (4, 12)
    assert layout.kept is not None and layout.kept.tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    for tensor in (layout.cu_seqlens_q, layout.cu_seqlens_k, layout.seqused_k, layout.block_table):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


def test_layout_keeps_all_queries_without_an_index():
    assert build_layout([Segment(0, 2, 5), Segment(0, 1, 6)], 8, 4, "cpu").kept is None


def test_largest_pool_index_stays_in_the_pool():
    layout = build_layout([Segment(2, 1, 8), Segment(0, 1, 1)], pool_len=8, page_size=4, device="cpu")
    assert layout.block_table.max() == 3 * 8 // 4 - 1


@pytest.mark.parametrize(
    "segment, message",
    [
        (Segment(2, 1, 1), "outside a pool of 2 batch rows"),
        (Segment(-1, 1, 1), "outside a pool of 2 batch rows"),
        (Segment(0, 1, 9), r"more keys than a row of the pool holds \(8\)"),
        (Segment(0, 3, 2), "no more queries than keys"),
        (Segment(0, 0, 2), "at least one query"),
        (Segment(0, 2, 3), "hold 2 queries in all, but 1 are packed"),
    ],
)
def test_segments_that_do_not_fit_are_refused(segment, message):
    with pytest.raises(ValueError, match=message):
        check_segments([segment], tokens=1, rows=2, pool_len=8)


def test_kernel_is_not_called_for_nothing(make_case):
    def kernel(*_):
        raise AssertionError("called")

    case = make_case([Segment(0, 1, 0), Segment(0, 1, 0)], page_size=4)
    output = paged_attention(kernel, case.query, case.key_pool, case.value_pool, case.segments, 4, {})
    assert output.shape == (1, 2, 4, 8) and not output.any()


def test_layout_is_built_once_and_checked_first(make_case, nested):
    layouts, scratch = [], {}

    def kernel(query, keys, values, layout):
        layouts.append(layout)
        return query

    case = make_case(nested, page_size=256)
    for _ in range(2):
        output = paged_attention(kernel, case.query, case.key_pool, case.value_pool, case.segments, 256, scratch)
    assert layouts[0] is layouts[1] and len(scratch) == 1
    assert output.is_contiguous()
    expected = case.query.transpose(1, 2).clone()
    expected[:, 26:28] = 0  # the two padding queries
    assert torch.equal(output, expected)
    with pytest.raises(ValueError, match="are packed"):
        paged_attention(kernel, case.query, case.key_pool, case.value_pool, case.segments[1:], 256, {})
