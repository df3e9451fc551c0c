"""The processor's fast path on real processors and real photographs."""

from __future__ import annotations

import base64
import copy
import io
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

pytest.importorskip("skimage")
from PIL import Image  # noqa: E402

import offline  # noqa: E402
import vlcache_hf  # noqa: E402
from vlcache_hf import VLCache, VLCacheProcessor, attach_processor  # noqa: E402
from vlcache_hf.lazy import LazyPixels  # noqa: E402


@pytest.fixture(scope="module")
def stock() -> Any:
    return offline.build_model("qwen3_vl", "tiny")


@pytest.fixture
def ours(tmp_path: Path) -> Any:
    return vlcache_hf.attach(offline.build_model("qwen3_vl", "tiny"), {"cache_dir": tmp_path / "cache"})


def fast(tmp_path: Path, **settings: Any) -> Any:
    return attach_processor(
        offline.build_processor("qwen3_vl", max_pixels=160 * 160), {"cache_dir": tmp_path / "cache", **settings}
    )


@pytest.fixture
def plain() -> Any:
    return offline.build_processor("qwen3_vl", max_pixels=160 * 160)


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    return [picture.resize((180, 140)) for picture in list(offline.photographs().values())[:3]]


def encoded(picture: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "JPEG", **options)
    return buffer.getvalue()


def ask(processor: Any, *images: Any, key: str = "image", question: str = "What is this?", **kwargs: Any) -> Any:
    content = [{"type": "image", key: image} for image in images] + [{"type": "text", "text": question}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
        **kwargs,
    )


def generate(model: Any, inputs: Any) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=4, do_sample=False)


def counts(processor: Any) -> tuple[int, int]:
    cache = processor.image_processor.vlcache
    return cache.known, cache.processed


def test_a_known_file_is_not_decoded_and_the_answer_is_stocks(
    tmp_path: Path, ours: Any, stock: Any, plain: Any, pictures: list[Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(encoded(pictures[0]))
    processor = fast(tmp_path)
    expected = generate(stock, ask(plain, str(path), key="path"))
    assert torch.equal(generate(ours, ask(processor, str(path), key="path")), expected)
    assert ours.vlcache.last_request.images[0].kv == "miss" and counts(processor) == (0, 1)
    again = fast(tmp_path)  # as after a restart
    monkeypatch.setattr("vlcache_hf.processing.attach.decoded", lambda *a: pytest.fail("decoded"))
    assert torch.equal(generate(ours, ask(again, str(path), key="path")), expected)
    record = ours.vlcache.last_request.images[0]
    assert (record.kv, record.encoder) == ("exact", "skipped") and counts(again) == (1, 0)


def test_what_it_returns_is_what_stock_returns(tmp_path: Path, plain: Any, pictures: list[Image.Image]) -> None:
    processor, data = fast(tmp_path), [encoded(picture) for picture in pictures]
    paths = [tmp_path / f"{index}.jpg" for index in range(3)]
    for path, content in zip(paths, data):
        path.write_bytes(content)
    expected = ask(plain, *map(str, paths), key="path")
    for index in range(2):
        got = ask(processor, *map(str, paths), key="path")
        assert list(got) == list(expected)
        pixels = got.pop("pixel_values")
        assert isinstance(pixels, LazyPixels) and isinstance(pixels, torch.Tensor)
        assert all(pixels.digest(image) for image in range(3))  # what a model asks for; now they are known
        assert torch.equal(pixels, expected["pixel_values"])
        assert all(torch.equal(got[name], expected[name]) for name in got)
        assert counts(processor) == (3 * index, 3 + 3 * index)  # the comparison just now processed them again


@pytest.mark.parametrize("kind", ["path", "base64", "data", "bytes", "url", "pil", "array", "tensor"])
def test_every_kind_of_image_is_recognised(
    kind: str, tmp_path: Path, ours: Any, stock: Any, plain: Any, pictures: list[Image.Image], server: Any
) -> None:
    if kind == "url":
        pytest.importorskip("httpx")
    data = encoded(pictures[0])
    (tmp_path / "a.jpg").write_bytes(data)
    server.content = data
    pixels = torch.randint(0, 255, (3, 140, 180), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image, key = {
        "path": (str(tmp_path / "a.jpg"), "path"),
        "base64": (base64.b64encode(data).decode(), "base64"),
        "data": ("data:image/jpeg;base64," + base64.b64encode(data).decode(), "url"),
        "bytes": (data, "image"),
        "url": (server.url, "url"),
        "pil": (Image.open(io.BytesIO(data)), "image"),
        "array": (pixels.numpy(), "image"),
        "tensor": (pixels, "image"),
    }[kind]
    processor = fast(tmp_path)
    if kind == "bytes":  # which stock does not take
        expected = generate(stock, ask(plain, str(tmp_path / "a.jpg"), key="path"))
    else:
        expected = generate(stock, ask(plain, image, key=key))
    for state in ((0, 1), (1, 1)):
        assert torch.equal(generate(ours, ask(processor, image, key=key)), expected)
        assert counts(processor) == state
    assert ours.vlcache.last_request.images[0].kv == "exact"


def test_content_decides_not_the_name(tmp_path: Path, ours: Any, stock: Any, plain: Any, pictures: list) -> None:
    """An overwritten file with its old time, a re-targeted link, a drawn-on picture, an edited array."""
    path, link, processor = tmp_path / "frame.jpg", tmp_path / "link.jpg", fast(tmp_path)
    array = torch.full((3, 140, 180), 9, dtype=torch.uint8)
    drawn = pictures[2].copy()

    def check(image: Any, key: str) -> None:
        assert torch.equal(generate(ours, ask(processor, image, key=key)), generate(stock, ask(plain, image, key=key)))
        assert ours.vlcache.last_request.images[0].encoder == "miss"

    path.write_bytes(encoded(pictures[0]))
    link.symlink_to(path)
    check(str(path), "path")
    times = path.stat()
    path.write_bytes(encoded(pictures[1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    check(str(path), "path")
    (tmp_path / "other.jpg").write_bytes(encoded(pictures[2], quality=40))
    link.unlink()
    link.symlink_to(tmp_path / "other.jpg")
    check(str(link), "path")
    for image, edit in ((drawn, lambda: drawn.paste((255, 0, 0), (0, 0, 90, 90))), (array, lambda: array[0].zero_())):
        check(image, "image")
        edit()
        check(image, "image")
    assert counts(processor)[0] == 0


def test_modes_palettes_and_transparency_are_part_of_an_image(tmp_path: Path, plain: Any) -> None:
    indices = bytes(range(256)) * 64
    twins = []
    for shift in (0, 100):
        image = Image.frombytes("P", (128, 128), indices)
        image.putpalette([(value + shift) % 256 for value in range(768)])
        twins.append(image)
    twins += [Image.frombytes("L", (128, 128), indices), Image.frombytes("L", (64, 256), indices)]
    processor = fast(tmp_path)
    for _ in range(2):
        for image in twins:
            got = ask(processor, image)
            got["pixel_values"].digest(0)
            assert torch.equal(got["pixel_values"], ask(plain, image)["pixel_values"])
    assert processor.image_processor.vlcache.known == 4


def test_every_setting_of_the_processor_counts(tmp_path: Path, plain: Any, pictures: list[Image.Image]) -> None:
    processor = fast(tmp_path)
    variants: list[dict[str, Any]] = [
        {},
        {"images_kwargs": {"size": {"shortest_edge": 4096, "longest_edge": 96 * 96}}},
        {"images_kwargs": {"do_normalize": False}},
        {"images_kwargs": {"resample": 0}},
    ]
    for expected_known in (0, 1):
        for kwargs in variants:
            known = counts(processor)[0]
            got = ask(processor, pictures[0], processor_kwargs=kwargs)
            assert counts(processor)[0] - known == expected_known
            got["pixel_values"].digest(0)
            expected = ask(plain, pictures[0], processor_kwargs=kwargs)
            assert torch.equal(got["image_grid_thw"], expected["image_grid_thw"])
            assert torch.equal(got["pixel_values"], expected["pixel_values"])
    known = counts(processor)[0]
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]  # an attribute, not an argument
    ask(processor, pictures[0])
    assert counts(processor)[0] == known


def test_when_the_entries_are_gone_the_pixels_are_computed(
    tmp_path: Path, ours: Any, stock: Any, plain: Any, pictures: list[Image.Image]
) -> None:
    processor, picture = fast(tmp_path), pictures[0].copy()
    expected = generate(stock, ask(plain, picture))
    generate(ours, ask(processor, picture))
    inputs = ask(processor, picture)
    assert counts(processor) == (1, 1)
    ours.vlcache.clear()
    picture.paste((0, 0, 0), (0, 0, 180, 140))  # too late to matter
    assert torch.equal(generate(ours, inputs), expected)
    record = ours.vlcache.last_request.images[0]
    assert (record.kv, record.encoder, record.stored) == ("miss", "miss", True) and counts(processor) == (1, 2)


def test_only_what_is_missing_is_processed(
    tmp_path: Path, ours: Any, stock: Any, plain: Any, pictures: list[Image.Image]
) -> None:
    processor = fast(tmp_path)
    ours.vlcache.config.reuse = "exact"
    generate(ours, ask(processor, pictures[0]))
    inputs = ask(processor, pictures[1], pictures[0], pictures[2], pictures[1])
    assert counts(processor) == (1, 1 + 3)
    got = generate(ours, inputs)
    assert [image.encoder for image in ours.vlcache.last_request.images].count("miss") >= 2
    # in this context its KV is not known: all of them are needed but for the second sight of one
    assert counts(processor) == (1, 4)
    assert torch.equal(got, generate(stock, ask(plain, pictures[1], pictures[0], pictures[2], pictures[1])))


def test_batches_and_beams(tmp_path: Path, ours: Any, stock: Any, plain: Any, pictures: list[Image.Image]) -> None:
    processor = fast(tmp_path)

    def batch(kind: Any) -> Any:
        chats = [
            [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
            for image, text in zip(pictures, ("What?", "Where is that?", "Who?"))
        ]
        options = {"padding": True, "padding_side": "left"}
        return kind.apply_chat_template(
            chats,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
            processor_kwargs=options,
        )

    expected = [stock.generate(**batch(plain), max_new_tokens=4, do_sample=False, num_beams=beams) for beams in (1, 2)]
    for state in ("miss", "exact"):
        for beams, wanted in zip((1, 2), expected):
            got = ours.generate(**batch(processor), max_new_tokens=4, do_sample=False, num_beams=beams)
            assert torch.equal(got, wanted)
    assert {image.kv for image in ours.vlcache.last_request.images} == {"exact"}
    assert counts(processor) == (9, 3)


def test_a_stock_model_gets_real_pixels(tmp_path: Path, stock: Any, plain: Any, pictures: list[Image.Image]) -> None:
    processor = fast(tmp_path)
    expected = generate(stock, ask(plain, pictures[0]))
    for _ in range(2):
        inputs = ask(processor, pictures[0])
        inputs["pixel_values"].digest(0)
        assert torch.equal(generate(stock, inputs), expected)
    assert counts(processor) == (1, 2)


def test_another_dtype_has_a_digest_of_its_own(tmp_path: Path, pictures: list[Image.Image]) -> None:
    ours = vlcache_hf.attach(
        offline.build_model("qwen3_vl", "tiny").to(torch.bfloat16), {"cache_dir": tmp_path / "cache"}
    )
    processor = fast(tmp_path)
    for state in ((0, 1), (1, 1)):
        inputs = ask(processor, pictures[0]).to("cpu", dtype=torch.bfloat16)
        assert isinstance(inputs["pixel_values"], LazyPixels) and inputs["pixel_values"].dtype == torch.bfloat16
        generate(ours, inputs)
        assert counts(processor) == state
    assert ours.vlcache.last_request.images[0].kv == "exact"
    generate(ours, ask(processor, pictures[0]))
    assert ours.vlcache.last_request.images[0].kv == "miss", "fp32 pixels are other pixels"


def test_a_record_that_lies_about_the_pixels_poisons_nothing(
    tmp_path: Path, ours: Any, stock: Any, plain: Any, pictures: list[Image.Image]
) -> None:
    """Another machine may round in another way: then nothing is stored under its keys, and the record is put right."""
    processor = fast(tmp_path)
    expected = generate(stock, ask(plain, pictures[0]))
    generate(ours, ask(processor, pictures[0]))
    (known,) = processor.image_processor.vlcache.images._recent.values()
    true = dict(known.digests)
    known.digests.update(dict.fromkeys(known.digests, "0" * 64))
    assert torch.equal(generate(ours, ask(processor, pictures[0])), expected)
    record = ours.vlcache.last_request
    assert record.in_full and not any(image.stored for image in record.images) and record.bytes_written == 0
    known.digests.update(true)
    assert torch.equal(generate(ours, ask(processor, pictures[0])), expected)
    assert ours.vlcache.last_request.images[0].kv == "exact"


def test_a_lie_about_another_dtype_is_found_too_and_put_right(
    tmp_path: Path, plain: Any, pictures: list[Image.Image]
) -> None:
    """Whoever casts the inputs to bfloat16 has no digest of the processor's own dtype in the record."""
    processor = fast(tmp_path)
    true = ask(processor, pictures[0]).to("cpu", dtype=torch.bfloat16)["pixel_values"].digest(0)
    (known,) = processor.image_processor.vlcache.images._recent.values()
    assert known.digests == {"torch.bfloat16": true}
    known.digests["torch.bfloat16"] = "0" * 64
    pixels = ask(processor, pictures[0]).to("cpu", dtype=torch.bfloat16)["pixel_values"]
    assert pixels.digest(0) == "0" * 64
    assert torch.equal(pixels.patches(0), ask(plain, pictures[0])["pixel_values"].bfloat16()) and pixels.changed(0)
    for other in (processor, fast(tmp_path)):  # in memory, and in the store
        again = ask(other, pictures[0]).to("cpu", dtype=torch.bfloat16)["pixel_values"]
        assert again.digest(0) == true and counts(other)[0] > 0


def test_arrays_of_every_dtype_and_shape(tmp_path: Path, plain: Any, pictures: list[Image.Image]) -> None:
    levels = np.array(pictures[0])
    unit = torch.from_numpy(levels / 255.0).permute(2, 0, 1)
    images: list[Any] = [
        levels / 255.0,
        (levels / 255.0).astype(np.float32),
        levels.astype(np.int32),
        levels > 100,
        levels[::2, ::2],
        unit.float(),
        unit.bfloat16(),
    ]
    processor = fast(tmp_path)
    for image in images:
        expected = plain.image_processor(image, return_tensors="pt")["pixel_values"]
        for is_known in (0, 1):
            known = counts(processor)[0]
            pixels = processor.image_processor(image, return_tensors="pt")["pixel_values"]
            assert counts(processor)[0] - known == is_known
            pixels.digest(0)
            assert torch.equal(pixels, expected)
    stacked = np.stack([levels, levels[::-1]])
    for image in (unit.float().requires_grad_(), stacked, [stacked, stacked]):
        for _ in range(2):
            expected, got = (p.image_processor(image, return_tensors="pt") for p in (plain, processor))
            assert all(torch.equal(got[name], expected[name]) for name in expected)
    nested = torch.from_numpy(stacked).permute(0, 3, 1, 2)
    for either in (plain, processor):
        with pytest.raises(ValueError, match="too many values"):
            either.image_processor([[nested]], return_tensors="pt")


def rotated(picture: Image.Image, path: Path) -> str:
    exif = Image.Exif()
    exif[0x112] = 6
    picture.save(path, "JPEG", exif=exif)
    return str(path)


def test_the_image_processor_alone_takes_paths(tmp_path: Path, plain: Any, pictures: list[Image.Image]) -> None:
    path, processor = rotated(pictures[0], tmp_path / "a.jpg"), fast(tmp_path)
    for images in (path, [path], [[path], [path]], [path, pictures[1]]):
        for method in ("__call__", "preprocess"):
            for _ in range(2):
                expected, got = (getattr(p.image_processor, method)(images) for p in (plain, processor))
                assert all(torch.equal(got[name], expected[name]) for name in expected)
                if isinstance(got["pixel_values"], LazyPixels) and got["pixel_values"].grids:
                    got["pixel_values"].digest(0)
    for nothing in (None, 3, [None]):
        with pytest.raises(TypeError, match="only a single or a list of entries"):
            processor.image_processor(nothing)


def test_an_opened_image_that_is_drawn_on_is_another(tmp_path: Path, plain: Any, pictures: list[Image.Image]) -> None:
    path, processor = tmp_path / "a.png", fast(tmp_path)
    pictures[0].save(path)
    processor.image_processor(str(path))["pixel_values"].digest(0)
    opened = processor.image_processor.fetch_images(str(path))
    opened.paste((255, 0, 0), (0, 0, 90, 90))
    expected = plain.image_processor(Image.frombytes(opened.mode, opened.size, opened.tobytes()))
    assert torch.equal(processor.image_processor(opened)["pixel_values"], expected["pixel_values"])


def test_every_frame_of_an_animation_counts_as_for_stock(
    tmp_path: Path, plain: Any, pictures: list[Image.Image]
) -> None:
    path, processor = tmp_path / "a.gif", fast(tmp_path)
    pictures[0].save(path, save_all=True, append_images=pictures[1:])
    expected = plain.image_processor(str(path))
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    for _ in range(2):
        got = processor.image_processor(str(path))
        assert torch.equal(got["image_grid_thw"], expected["image_grid_thw"])
        got["pixel_values"].digest(0)
        assert torch.equal(got["pixel_values"], expected["pixel_values"])
        with pytest.raises(ValueError, match="and 3 images"):
            processor(images=[str(path)], text=[text], return_tensors="pt")


def known_pixels(tmp_path: Path, picture: Image.Image) -> LazyPixels:
    processor = fast(tmp_path)
    processor.image_processor(picture)["pixel_values"].digest(0)
    pixels = processor.image_processor(picture)["pixel_values"]
    assert counts(processor) == (1, 1)
    return pixels


def test_a_second_dtype_keeps_the_rounding_of_the_first(
    tmp_path: Path, plain: Any, pictures: list[Image.Image]
) -> None:
    pixels, expected = known_pixels(tmp_path, pictures[0]), plain.image_processor(pictures[0])["pixel_values"]
    narrow = pixels.to(torch.bfloat16)
    assert isinstance(narrow, LazyPixels) and isinstance(narrow.to("cpu", copy=True), LazyPixels)
    assert torch.equal(narrow.float(), expected.bfloat16().float())
    assert torch.equal(pixels.to(torch.int32).float(), expected.to(torch.int32).float())
    assert torch.equal(pixels, expected)


def test_pixels_that_inference_computed_can_be_trained_on(tmp_path: Path, pictures: list[Image.Image]) -> None:
    pixels = known_pixels(tmp_path, pictures[0])
    with torch.inference_mode():
        total = pixels.sum()
    weight = torch.ones(pixels.shape[1], requires_grad=True)
    (pixels @ weight).sum().backward()
    assert weight.grad is not None and torch.allclose(weight.grad.sum(), total, rtol=1e-3)


def test_pixels_are_lent_through_dlpack(tmp_path: Path, plain: Any, pictures: list[Image.Image]) -> None:
    expected = plain.image_processor(pictures[0])["pixel_values"]
    assert torch.equal(torch.from_dlpack(known_pixels(tmp_path, pictures[0])), expected)
    assert np.array_equal(np.from_dlpack(known_pixels(tmp_path / "b", pictures[0])), expected.numpy())


def test_namespaces_know_nothing_of_each_other(tmp_path: Path, pictures: list[Image.Image]) -> None:
    for namespace in ("a", "b"):
        processor = fast(tmp_path, namespace=namespace)
        ask(processor, pictures[0])["pixel_values"].digest(0)
        assert counts(processor) == (0, 1)
    processor = fast(tmp_path, namespace="a")
    ask(processor, pictures[0])
    assert counts(processor) == (1, 0)


def test_a_processor_can_be_saved_copied_and_pickled(tmp_path: Path, pictures: list[Image.Image]) -> None:
    processor = fast(tmp_path)
    ask(processor, pictures[0])["pixel_values"].digest(0)
    for other in (copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):
        known, processed = counts(other)
        ask(other, pictures[0])
        assert counts(other) == (known + 1, processed)
    processor.save_pretrained(tmp_path / "saved")
    assert "vlcache" not in (tmp_path / "saved" / "processor_config.json").read_text().lower()
    settings = {"cache_dir": tmp_path / "cache"}
    loaded = VLCacheProcessor.from_pretrained(tmp_path / "saved", vlcache_config=settings)
    ask(loaded, pictures[0])
    assert counts(loaded)[0] + counts(loaded)[1] == 1
    assert type(loaded).__name__ == "Qwen3VLProcessor" and type(loaded.image_processor).__name__ == (
        type(processor.image_processor).__name__
    )


def test_other_requests_are_left_to_stock(tmp_path: Path, plain: Any, pictures: list[Image.Image]) -> None:
    processor = fast(tmp_path)
    got = processor(images=[pictures[0]], text=["<|vision_start|><|image_pad|><|vision_end|>"], return_tensors="np")
    assert not isinstance(got["pixel_values"], LazyPixels) and counts(processor) == (0, 1)
    with pytest.raises(ValueError, match="Incorrect image source"):
        ask(processor, "no such file", key="path")
    with pytest.raises(ValueError, match="Found total 0"):
        processor(images=[pictures[0]], text=["no place for an image"], return_tensors="pt")
    with pytest.raises(TypeError, match="takes processors of Qwen2.5-VL and Qwen3-VL, got Tokenizer"):
        attach_processor(type("Tokenizer", (), {})())
    with pytest.raises(TypeError, match="from_pretrained"):
        VLCacheProcessor()


def test_a_read_only_store_and_a_broken_record(tmp_path: Path, pictures: list[Image.Image]) -> None:
    processor = fast(tmp_path)
    ask(processor, pictures[0])["pixel_values"].digest(0)
    (file,) = (tmp_path / "cache" / "src").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    reader = fast(tmp_path, read_only=True)
    ask(reader, pictures[0])["pixel_values"].digest(0)
    assert counts(reader) == (0, 1)


def test_settings_of_one_call_reach_the_model(tmp_path: Path, ours: Any, pictures: list[Image.Image]) -> None:
    processor = fast(tmp_path)
    for state in ("miss", "exact"):
        inputs = ask(processor, pictures[0])
        ours.generate(**inputs, max_new_tokens=1, do_sample=False, cache=VLCache(namespace="x"))
        assert ours.vlcache.last_request.images[0].kv == state


@pytest.fixture
def server() -> Iterator[Any]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(httpd.content)

        def log_message(self, *args: Any) -> None:
            pass

    httpd: Any = HTTPServer(("127.0.0.1", 0), Handler)
    httpd.content, httpd.url = b"", f"http://127.0.0.1:{httpd.server_port}/a.jpg"
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()
