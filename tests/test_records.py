from __future__ import annotations

import json

from vlcache_hf.records import ImageRecord, RequestRecord, Stats, StatsCounter


def _record() -> RequestRecord:
    images = [
        ImageRecord(row=0, tokens=100, kv="exact", encoder="skipped", recomputed=0, layers=4, bytes_read=2048),
        ImageRecord(row=0, tokens=100, kv="reused", encoder="hit", recomputed=40, layers=4),
        ImageRecord(row=1, tokens=10, kv="miss", encoder="miss", recomputed=40, layers=4, stored=True),
    ]
    return RequestRecord(images, text_tokens=7, bytes_read=2048, bytes_written=5_000_000, seconds={"prefill": 0.25})


def test_ratio_and_lossy():
    record = _record()
    assert [image.ratio for image in record.images] == [0.0, 0.1, 1.0]
    assert record.lossy
    assert not RequestRecord(record.images[:1]).lossy
    assert ImageRecord(row=0, tokens=0).ratio == 0.0


def test_a_record_reads_well_and_serialises():
    text = str(_record())
    assert "3 image(s), 7 text tokens, read 2.0 KiB, wrote 4.8 MiB" in text
    assert "image 1 (row 0): 100 tokens, kv reused, encoder hit, recomputed 10.0 %" in text
    assert "prefill 250.0 ms" in text
    assert max(map(len, text.splitlines())) <= 100
    assert json.loads(json.dumps(_record().to_dict()))["images"][2]["stored"] is True
    assert "computed in full: because" in str(RequestRecord(in_full="because"))


def test_stats_add_up():
    counter = StatsCounter()
    counter.vision_call()
    counter.add(_record())
    counter.add(RequestRecord([ImageRecord(row=0, tokens=5, recomputed=5, layers=1, encoder="hit")], in_full="video"))
    stats = counter.snapshot(faults=2)
    assert (stats.requests, stats.in_full, stats.exact, stats.reused, stats.missed) == (2, 1, 1, 1, 2)
    assert (stats.encoder_hits, stats.vision_calls, stats.entries_stored, stats.faults) == (2, 1, 1, 2)
    assert (stats.tokens_reused, stats.tokens_recomputed) == (190, 25)
    assert (stats.bytes_read, stats.bytes_written) == (2048, 5_000_000)
    assert "1 exact, 1 reused, 2 missed" in str(stats)
    assert json.loads(json.dumps(stats.to_dict()))["requests"] == 2
    stats.seconds["prefill"] = 9.0
    assert counter.snapshot(0).seconds == {"prefill": 0.25}


def test_empty_stats_print():
    assert "0 requests" in str(Stats())
