"""Rows are loaded one layer ahead, by whom it should be, and whatever goes wrong ends as it would have without."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from streams import LateStream
from vlcache_hf import VLCache, attach, readahead
from vlcache_hf.readahead import THREAD_NAME, ReadAhead, Rows
from vlcache_hf.state import PrefillState
from vlcache_hf.store import Entry, MemoryEntry, StoreReadError

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
A, B = tiny.image(1, 8, 12), tiny.image(2)
LAYERS = 4


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def in_reader() -> bool:
    return threading.current_thread().name.startswith(THREAD_NAME)


class Stored:
    """An entry of one tensor a layer, which notes who reads it."""

    fields: dict[str, str] = {}

    def __init__(self, ready: bool = False, bad: tuple[str, ...] = ()) -> None:
        self.tensors = {f"k.{layer}": torch.randn(6, 2, 3) for layer in range(LAYERS)}
        self.is_ready, self.bad = ready, bad
        self.reads: list[tuple[str, bool]] = []
        self.gate = threading.Event()
        self.gate.set()

    def keys(self) -> list[str]:
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def ready(self, name: str, start: int, stop: int) -> bool:
        return self.is_ready

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        self.reads.append((name, in_reader()))
        if in_reader():
            assert self.gate.wait(60)
        if name in self.bad:
            raise StoreReadError(f"{name} is bad")
        return self.tensors[name][start:stop]


def rows_of(entry: Stored, layer: int, start: int = 0, stop: int = 6) -> Rows:
    return Rows(entry, (f"k.{layer}",), start, stop)


def equal(got: list[torch.Tensor], rows: Rows) -> bool:
    expected = [rows.entry.tensors[name][rows.start : rows.stop] for name in rows.names]  # type: ignore[attr-defined]
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    """The CPU, as if it were a GPU."""
    stream = LateStream()
    monkeypatch.setattr(readahead, "copy_stream", lambda device: stream if device == CPU else None)
    return stream


class Prompt(ThreadPoolExecutor):
    """Has begun what it is given when it has been given it: what it has not begun is done by whoever needs it."""

    made: list[str] = []

    def __init__(self, workers: int, name: str) -> None:
        self.made.append(name)
        super().__init__(workers, name)

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Any:
        begun = threading.Event()

        def run() -> Any:
            begun.set()
            return work()

        future = super().submit(run)
        assert begun.wait(60)
        return future


@pytest.fixture(autouse=True)
def threads_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(Prompt, "made", [])
    monkeypatch.setattr(readahead, "ThreadPoolExecutor", Prompt)
    return Prompt.made


def test_what_is_ready_is_read_when_it_is_taken(threads_made: list[str]) -> None:
    entry, ahead = Stored(ready=True), ReadAhead(CPU)
    ahead.begin([rows_of(entry, 0)])
    ahead.begin([rows_of(entry, 1)])
    assert entry.reads == []
    assert ahead.take(rows_of(entry, 0), CPU)[0].data_ptr() == entry.tensors["k.0"].data_ptr(), "no copy"
    assert entry.reads == [("k.0", False)] and threads_made == []
    ahead.close()


def test_what_is_not_ready_is_read_in_a_thread_a_layer_ahead(threads_made: list[str]) -> None:
    entry, ahead = Stored(), ReadAhead(CPU)
    ahead.begin([rows_of(entry, 0), rows_of(entry, 0, 2, 3), rows_of(entry, 0)])
    for layer in range(LAYERS):
        ahead.begin([rows_of(entry, layer + 1)] if layer + 1 < LAYERS else [])
        assert equal(ahead.take(rows_of(entry, layer), CPU), rows_of(entry, layer))
    assert entry.reads == [("k.0", True), ("k.0", True), ("k.1", True), ("k.2", True), ("k.3", True)]
    assert threads_made == [THREAD_NAME]
    ahead.close()
    assert readers() == []


def test_what_was_not_foreseen_is_read_when_it_is_taken() -> None:
    entry, ahead = Stored(), ReadAhead(CPU)
    ahead.begin([rows_of(entry, 0)])
    ahead.begin([])
    assert equal(ahead.take(rows_of(entry, 0, 1, 4), CPU), rows_of(entry, 0, 1, 4))
    assert equal(ahead.take(rows_of(entry, 0), CPU), rows_of(entry, 0))
    assert equal(ahead.take(rows_of(entry, 1), CPU), rows_of(entry, 1))
    assert sorted(entry.reads) == [("k.0", False), ("k.0", True), ("k.1", False)]
    ahead.close()


def test_an_error_is_met_by_whoever_takes_the_rows() -> None:
    good, bad = Stored(), Stored(bad=("k.0",))
    ahead = ReadAhead(CPU)
    ahead.begin([rows_of(bad, 0), rows_of(good, 0)])
    ahead.begin([])
    assert equal(ahead.take(rows_of(good, 0), CPU), rows_of(good, 0))
    with pytest.raises(StoreReadError, match="k.0 is bad"):
        ahead.take(rows_of(bad, 0), CPU)
    assert bad.reads == [("k.0", True)], "what was found bad once is not given a second chance"
    ahead.close()


@pytest.mark.parametrize("gpu", [True, False])
def test_what_the_thread_has_not_come_to_is_read_by_who_needs_it(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, gpu: bool
) -> None:
    if gpu:
        request.getfixturevalue("stream")
    monkeypatch.setattr(readahead, "ThreadPoolExecutor", ThreadPoolExecutor)
    entry, ahead = Stored(), ReadAhead(CPU)
    entry.gate.clear()
    for layer in range(3):
        ahead.begin([rows_of(entry, layer, 0, 3), rows_of(entry, layer, 3, 6)])
    for part in ((0, 3), (3, 6)):
        assert equal(ahead.take(rows_of(entry, 1, *part), CPU), rows_of(entry, 1, *part))
    entry.gate.set()
    ahead.begin([])
    assert equal(ahead.take(rows_of(entry, 2, 0, 3), CPU), rows_of(entry, 2, 0, 3))
    ahead.close()
    assert [who for name, who in entry.reads if name == "k.1"] == [False, False]


def test_closing_ends_what_is_under_way_and_drops_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Stored()
    entry.gate.clear()

    class OpensTheGate(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            entry.gate.set()
            super().shutdown(wait)

    monkeypatch.setattr(readahead, "ThreadPoolExecutor", OpensTheGate)
    ahead = ReadAhead(CPU)
    for layer in range(LAYERS):
        ahead.begin([rows_of(entry, layer)])
    ahead.close()
    assert readers() == []
    assert entry.reads in ([], [("k.0", True)])
    ahead.close()


def test_without_a_thread_it_is_read_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    entry, ahead = Stored(), ReadAhead(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        ahead.begin([rows_of(entry, 0)])
    ahead.begin([rows_of(entry, 1)])
    assert equal(ahead.take(rows_of(entry, 0), CPU), rows_of(entry, 0))
    ahead.begin([])
    assert equal(ahead.take(rows_of(entry, 1), CPU), rows_of(entry, 1))
    ahead.close()
    assert sorted(entry.reads) == [("k.0", False), ("k.1", True)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_reads_for_itself() -> None:
    entry, ahead = Stored(), ReadAhead(CPU)
    entry.gate.clear()
    ahead.begin([rows_of(entry, 0)])
    ahead.begin([])
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        good = equal(ahead.take(rows_of(entry, 0), CPU), rows_of(entry, 0))
        entry.gate.set()
        ahead.begin([rows_of(entry, 2)])
        ahead.begin([])
        good &= equal(ahead.take(rows_of(entry, 2), CPU), rows_of(entry, 2)) and entry.reads[-1] == ("k.2", True)
        ahead.close()
        os._exit(0 if good and readers() == [] else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    entry.gate.set()
    assert code == 0
    assert equal(ahead.take(rows_of(entry, 0), CPU), rows_of(entry, 0))
    ahead.close()
    assert readers() == []


# --- to a GPU


def walk(ahead: ReadAhead, layers: list[list[Rows]]) -> None:
    """Takes all rows of all layers, as a prefill does."""
    ahead.begin(layers[0])
    for layer, wanted in enumerate(layers):
        ahead.begin(layers[layer + 1] if layer + 1 < len(layers) else [])
        for rows in wanted:
            assert equal(ahead.take(rows, CPU), rows)


def test_pinned_rows_are_sent_a_layer_ahead_without_a_thread(stream: LateStream, threads_made: list[str]) -> None:
    stream.pinned = True
    entry, ahead = Stored(ready=True), ReadAhead(CPU)
    walk(ahead, [[rows_of(entry, layer, 0, 2), rows_of(entry, layer, 4, 6)] for layer in range(3)])
    ahead.close()
    # a copy starts when its memory is free; the next layer's starts before this one's is waited for, once a layer
    assert stream.calls == [
        *[("mark", 1), ("copy", 1, 2)],
        *[("mark", 3), ("copy", 3, 4), ("wait", 2)],
        *[("mark", 6), ("copy", 6, 7), ("wait", 4)],
        *[("wait", 7), ("join",)],
    ]
    assert threads_made == [] and "pin" not in stream.threads


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_other_rows_go_through_pinned_memory_in_a_thread(stream: LateStream, ready: bool, inference: bool) -> None:
    entry, ahead = Stored(ready), ReadAhead(CPU)
    with torch.inference_mode(inference):  # only in that mode its tensors can be written, and each thread has its own
        walk(ahead, [[rows_of(entry, layer)] for layer in range(LAYERS)])
    assert ahead._staged and len(ahead._staged) <= 2
    ahead.close()
    assert all(name.startswith(THREAD_NAME) for name in stream.threads["pin"] | stream.threads["copy"])
    assert not any(name.startswith(THREAD_NAME) for name in stream.threads["mark"] | stream.threads["wait"])
    copies = [call[-1] for call in stream.calls if call[0] == "copy"]
    assert [call[1] for call in stream.calls if call[0] == "wait"] == copies and len(copies) == LAYERS
    # not more than two layers lie in pinned memory: the first must have arrived before the third is put there
    assert [call[1] for call in stream.calls if call[0] == "finish"] == copies[:2]
    assert stream.calls.index(("finish", copies[0])) < stream.calls.index(
        next(call for call in stream.calls if call[0] == "copy" and call[-1] == copies[2])
    )
    assert stream.calls[-1] == ("join",) and readers() == []


def test_a_layer_on_another_device_reads_directly_and_is_followed(stream: LateStream, threads_made: list[str]) -> None:
    stream.pinned = True
    entry, ahead = Stored(ready=True), ReadAhead(CPU)
    ahead.begin([rows_of(entry, 0)])
    ahead.begin([rows_of(entry, 1)])
    assert ahead.take(rows_of(entry, 0), ELSEWHERE)[0].device == ELSEWHERE
    copied = [call[0] for call in stream.calls].count("copy")
    ahead.begin([rows_of(entry, 2)])
    assert [call[0] for call in stream.calls].count("copy") == copied == 2
    assert ahead._left[0].rows.keys() == {rows_of(entry, 0)}, "it is kept: a copy may still write there"
    assert equal(ahead.take(rows_of(entry, 1), CPU), rows_of(entry, 1))
    ahead.close()
    assert stream.calls[-1] == ("join",) and ahead._left == [] and threads_made == []


def test_an_error_on_the_way_to_a_gpu_leaves_the_others_alone(stream: LateStream) -> None:
    good, bad = Stored(), Stored(bad=("k.0",))
    ahead = ReadAhead(CPU)
    ahead.begin([rows_of(bad, 0), rows_of(good, 0)])
    ahead.begin([])
    with pytest.raises(StoreReadError, match="k.0 is bad"):
        ahead.take(rows_of(bad, 0), CPU)
    assert equal(ahead.take(rows_of(good, 0), CPU), rows_of(good, 0))
    ahead.close()


def test_a_tensor_that_is_not_there_is_an_error_when_it_is_taken(stream: LateStream) -> None:
    entry, ahead = MemoryEntry({"k.0": torch.ones(6, 2)}, {}), ReadAhead(CPU)
    rows = Rows(entry, ("k.0", "v.0"), 0, 6)
    ahead.begin([rows])
    ahead.begin([])
    with pytest.raises(StoreReadError, match="no tensor 'v.0'"):
        ahead.take(rows, CPU)
    ahead.close()


# --- in a prefill


def restarted(folder: Path, **settings: Any) -> Any:
    """A model as after a restart: it has verified nothing yet."""
    return attach(
        tiny.stock("qwen3_vl"), {"cache_dir": folder, "schedule": 0.25, "lossy_multi_image": True, **settings}
    )


def logits(model: Any, inputs: dict[str, Any], **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny.clone(inputs), logits_to_keep=1, **kwargs).logits


INPUTS = tiny.batch(tiny.prompt(tiny.text(1, 4), A, tiny.text(2, 5), B, tiny.text(3, 4)), tiny.prompt(A, [5, 6]))
OTHER = tiny.batch(tiny.prompt(tiny.text(9, 6), A, tiny.text(2, 5), B, tiny.text(3, 4)))


@pytest.fixture
def read_by(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[bool]]:
    """Which keys and values in files were read in the thread (`True`), and which outside (`False`)."""
    rows, seen = Entry.rows, dict[str, set[bool]]()

    def noted(entry: Entry, name: str, start: int, stop: int) -> torch.Tensor:
        if name.startswith(("k.", "v.")):
            seen.setdefault(name, set()).add(in_reader())
        return rows(entry, name, start, stop)

    monkeypatch.setattr(Entry, "rows", noted)
    return seen


@pytest.mark.parametrize("storage", ["auto", "int8"])
def test_after_a_restart_a_hit_is_read_ahead_once(
    tmp_path: Path, threads_made: list[str], read_by: dict[str, set[bool]], storage: str
) -> None:
    logits(restarted(tmp_path, storage_dtype=storage), INPUTS)
    assert threads_made == [] and read_by == {}
    ours = restarted(tmp_path, storage_dtype=storage)
    got = logits(ours, INPUTS)
    assert tiny.kinds(ours) == ["exact"] * 3
    assert (got - logits(tiny.stock("qwen3_vl"), INPUTS)).abs().max() < (1e-5 if storage == "auto" else 0.5)
    assert len(read_by) == LAYERS * (2 if storage == "auto" else 4) and all(who == {True} for who in read_by.values())
    assert threads_made == [THREAD_NAME] and readers() == []
    bytes_read = ours.vlcache.last_request.bytes_read
    read_by.clear()
    assert torch.equal(logits(ours, INPUTS), got)
    assert tiny.kinds(ours) == ["exact"] * 3 and ours.vlcache.last_request.bytes_read == bytes_read
    assert threads_made == [THREAD_NAME] and all(who == {False} for who in read_by.values()), "checked before"


def test_what_is_in_memory_is_never_handed_over(tmp_path: Path, threads_made: list[str]) -> None:
    ours = restarted(tmp_path, max_ram_bytes=1 << 30)
    for expected in (["miss"] * 3, ["exact"] * 3, ["exact"] * 3):
        logits(ours, INPUTS)
        assert tiny.kinds(ours) == expected
    assert threads_made == []


@pytest.mark.parametrize("layer", range(LAYERS))
def test_damage_found_in_the_thread_is_a_miss(tmp_path: Path, read_by: dict[str, set[bool]], layer: int) -> None:
    inputs = tiny.batch(tiny.prompt(tiny.text(1, 4), A, tiny.text(2, 5)))
    ours = restarted(tmp_path)
    logits(ours, inputs)
    (file,) = (tmp_path / "kv").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    whole = Entry.tensor(ours.vlcache.store.get("kv", file.parent.name, file.stem), f"v.{layer}")
    data[data.index(whole.numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    read_by.clear()
    ours = restarted(tmp_path)
    expected = logits(tiny.stock("qwen3_vl"), inputs)
    assert (logits(ours, inputs) - expected).abs().max() < 1e-5
    assert tiny.kinds(ours) == ["miss"] and ours.vlcache.last_request.images[0].stored
    assert read_by[f"v.{layer}"] == {True} and f"v.{layer + 2}" not in read_by
    assert readers() == []
    assert (logits(ours, inputs) - expected).abs().max() < 1e-5
    assert tiny.kinds(ours) == ["exact"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_prefill_that_breaks_off_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    logits(restarted(tmp_path), INPUTS)
    ours = restarted(tmp_path)

    def fail(*args: Any) -> None:
        assert len(readers()) == 1
        raise error("stop")

    monkeypatch.setattr(PrefillState, "leave", fail)
    with pytest.raises(error, match="stop"):
        logits(ours, INPUTS)
    assert readers() == []


@pytest.mark.parametrize("kind", ["unverified", "verified", "memory"])
@pytest.mark.parametrize("policy", ["prefix", "cacheblend", "kvshare"])
@pytest.mark.parametrize("gpu", [True, False])
def test_reuse_is_the_same_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, policy: str, gpu: bool
) -> None:
    settings: dict[str, Any] = {"max_ram_bytes": 1 << 30 if kind == "memory" else 0, "guard": "warn"}
    answers = []
    for ahead in (True, False):
        ours = restarted(tmp_path / str(ahead), **settings)
        logits(ours, INPUTS)
        if kind == "unverified":
            ours = restarted(tmp_path / str(ahead), **settings)
        elif kind == "verified":
            logits(ours, INPUTS)
        stream = LateStream(pinned=kind == "memory")
        with monkeypatch.context() as patch:
            if ahead and gpu:
                patch.setattr(readahead, "copy_stream", lambda device: stream)
            elif not ahead:
                patch.setattr(ReadAhead, "begin", lambda *args: None)
            answers.append(logits(ours, OTHER, cache=VLCache(policy=policy)))
        assert tiny.kinds(ours) == ["reused", "reused"]
        record = ours.vlcache.last_request
        answers += [record.bytes_read, [image.recomputed for image in record.images]]
        assert readers() == []
        if ahead and gpu:
            calls = [call[0] for call in stream.calls]
            # selective policies read nothing of layer 0, and change what layer 2 reads when it is on its way already
            assert (calls.count("copy"), calls.count("wait")) == (LAYERS, LAYERS if policy == "prefix" else LAYERS - 1)
            assert calls[-1] == "join"
    assert torch.equal(answers[0], answers[3]) and answers[1:3] == answers[4:]


@pytest.mark.parametrize("pinned", [True, False])
def test_each_layer_is_sent_before_the_one_below_needs_its_own(
    tmp_path: Path, stream: LateStream, pinned: bool
) -> None:
    ours = restarted(tmp_path, max_ram_bytes=1 << 30)
    expected = logits(ours, INPUTS)
    stream.pinned, stream.calls = pinned, []
    got = logits(ours, INPUTS)
    assert tiny.kinds(ours) == ["exact"] * 3
    assert (got - expected).abs().max() < 1e-5
    steps = [call for call in stream.calls if call[0] in ("mark", "wait")]
    assert [step[0] for step in steps] == ["mark", "mark", "wait", "mark", "wait", "mark", "wait", "wait"]
    copies = {call[-1]: call[1] for call in stream.calls if call[0] == "copy"}
    marks = [step[1] for step in steps if step[0] == "mark"]
    assert [copies[step[1]] for step in steps if step[0] == "wait"] == marks, "each layer waits for its own rows"
