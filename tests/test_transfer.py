"""Copies between host and GPU: their order on a CUDA that only takes notes, and on a real one where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tiny
from streams import GPU, on_gpu, pinning
from vlcache_hf import attach
from vlcache_hf.transfer import CopyStream, HostCopies, copy_stream


class Notes:
    """`torch.cuda` as far as it is used here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        notes, now = self.calls, ["computing"]

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                self.blocking = blocking

            def synchronize(self) -> None:
                notes.append(("host waits for", self))

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def record_event(self, event: Event | None = None) -> Event:
                notes.append((self.name, "record"))
                return event or Event()

            def wait_event(self, event: Event) -> None:
                notes.append((self.name, "wait for", event))

            def wait_stream(self, other: Stream) -> None:
                notes.append((self.name, "wait for", other.name))

            def synchronize(self) -> None:
                notes.append(("host waits for", self.name))

        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, now[0] = now[0], stream.name
            yield
            now[0] = before

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("beside"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("computing"))
        monkeypatch.setattr(torch.cuda, "stream", on)
        copy = torch.Tensor.copy_

        def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            notes.append((now[0], "copy", non_blocking))
            return copy(target, source.as_subclass(torch.Tensor))

        monkeypatch.setattr(torch.Tensor, "copy_", noted)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    return Notes(monkeypatch).calls


def test_rows_are_sent_beside_the_computing(notes: list[tuple[Any, ...]]) -> None:
    stream = CopyStream(GPU)
    parts, targets = [torch.ones(3, 2), torch.ones(2)], [torch.zeros(3, 2), torch.zeros(2)]
    free = stream.mark()
    arrived = stream.copy(parts, targets, free)
    stream.wait(arrived)
    stream.finish(arrived)
    stream.join()
    assert notes == [
        ("computing", "record"),
        ("beside", "wait for", free),
        ("beside", "copy", True),
        ("beside", "copy", True),
        ("beside", "record"),
        ("computing", "wait for", arrived),
        ("host waits for", arrived),
        ("computing", "wait for", "beside"),
    ]
    assert all(map(torch.equal, parts, targets))
    assert arrived.blocking, "a thread that waits must not take a core from what computes"


def test_only_cuda_has_such_a_stream(notes: list[tuple[Any, ...]]) -> None:
    assert copy_stream(torch.device("cpu")) is copy_stream(torch.device("meta")) is None
    assert isinstance(copy_stream(GPU), CopyStream)


@pytest.mark.parametrize("works", [True, False])
def test_rows_are_copied_into_pinned_memory_if_there_is_any(
    notes: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    asked = pinning(monkeypatch, works)
    stream, rows = CopyStream(GPU), torch.randn(5, 2, 3)[1:4]
    for _ in range(2):
        assert torch.equal(stream.pin(rows), rows) and stream.pin(rows).data_ptr() != rows.data_ptr()
    assert not stream.is_pinned(rows)
    assert asked == [rows.shape] * (4 if works else 1), "where it failed once it is not tried again"


def test_on_the_cpu_a_capture_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pinning(monkeypatch, False)
    copies, tensor = HostCopies(), torch.randn(3, 4).t()
    copy = copies.copy(tensor)
    assert torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()
    copies.wait()
    assert asked == []


@pytest.mark.parametrize("works", [True, False])
def test_from_a_gpu_all_captures_are_waited_for_once(
    notes: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    asked = pinning(monkeypatch, works)
    copies = HostCopies()
    tensors = [torch.randn(3, 4).t() for _ in range(3)]
    made = [copies.copy(on_gpu(tensor)) for tensor in tensors]
    assert notes == [("computing", "copy", works)] * 3, "the host waits where memory cannot be pinned"
    copies.wait()
    assert notes[3:] == [("host waits for", "computing")]
    copies.wait()
    assert len(notes) == 4
    assert len(asked) == (3 if works else 1)
    for copy, tensor in zip(made, tensors):
        assert torch.equal(copy, tensor) and copy.is_contiguous() and type(copy) is torch.Tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [True, False])
def test_on_a_gpu_what_arrives_is_what_was_sent(pinned: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    stream = copy_stream(device)
    assert stream is not None
    rows = torch.randn(1 << 20)
    part = stream.pin(rows) if pinned else rows
    assert stream.is_pinned(part) == pinned
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(20):  # the memory of `target` is written by this, which must have come to its end
        target = torch.zeros_like(rows, device=device) + (busy @ busy)[0, 0]
        arrived = stream.copy([part], [target], stream.mark())
        stream.wait(arrived)
        assert torch.equal(target.cpu(), rows)
    copies = HostCopies()
    copy = copies.copy(target.view(1024, 1024).t())
    copies.wait()
    assert copy.is_pinned() and torch.equal(copy, rows.view(1024, 1024).t())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("max_ram_bytes", [0, 1 << 30])
def test_on_a_gpu_hits_equal_stock(tmp_path: Any, max_ram_bytes: int) -> None:
    inputs = tiny.batch(tiny.prompt(tiny.text(1, 4), tiny.image(1, 64, 64), tiny.text(2, 5)))
    inputs = {name: value.cuda() for name, value in inputs.items()}
    expected = tiny.stock("qwen3_vl").cuda()(**inputs, logits_to_keep=1).logits.detach()
    for kind in ("miss", "exact", "exact", "exact"):
        if kind == "miss" or max_ram_bytes == 0:  # without the RAM tier: as after a restart, each time
            settings = {"cache_dir": tmp_path, "max_ram_bytes": max_ram_bytes}
            ours = attach(tiny.stock("qwen3_vl").cuda(), settings)
        with torch.no_grad():
            got = ours(**inputs, logits_to_keep=1).logits
        assert tiny.kinds(ours) == [kind]
        assert (got - expected).abs().max() < 1e-4
