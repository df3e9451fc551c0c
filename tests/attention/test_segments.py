import logging

import pytest
import torch

from vlcache_hf.attention import flash, segments, varlen
from vlcache_hf.attention.segments import available, resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def kernel(*args, **kwargs): ...


@pytest.fixture
def offer(monkeypatch):
    """Pretends a GPU and says which kernels it has."""

    def offer(flash_attn: bool, block_table: bool, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        found, lost = (kernel, ""), (None, "it is not there; get it")
        monkeypatch.setattr(flash, "find_kernel", lambda: found if flash_attn else lost)
        monkeypatch.setattr(varlen, "find_kernel", lambda: found if block_table else lost)

    monkeypatch.setattr(torch.version, "hip", None)
    segments._announce.cache_clear()
    yield offer
    segments._announce.cache_clear()


@pytest.mark.parametrize(
    "flash_attn, block_table, expected",
    [
        (True, True, ["flash_attention_2", "varlen", "sdpa"]),
        (False, True, ["varlen", "sdpa"]),
        (True, False, ["flash_attention_2", "sdpa"]),
        (False, False, ["sdpa"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_order_on_cuda(offer, flash_attn, block_table, expected, dtype):
    offer(flash_attn, block_table)
    assert available(CUDA, dtype, 128) == expected
    assert resolve("auto", CUDA, dtype, 128).name == expected[0]
    for name in expected:
        attention = resolve(name, CUDA, dtype, 128)
        assert attention.name == name and attention.page_size == (1 if name == "sdpa" else 256)


@pytest.mark.parametrize(
    "device, dtype, head_dim, capability, told",
    [
        (CPU, torch.bfloat16, 128, (9, 0), "it runs on NVIDIA GPUs, not on device 'cpu'; move the model"),
        (CUDA, torch.float32, 128, (9, 0), "it takes float16 and bfloat16, not float32; load the model in one"),
        (CUDA, torch.bfloat16, 260, (9, 0), "it takes head sizes that are multiples of 8 up to 256, not 260"),
        (CUDA, torch.bfloat16, 20, (9, 0), "it takes head sizes that are multiples of 8 up to 256, not 20"),
        (CUDA, torch.float16, 64, (7, 5), "it needs compute capability 8.0, cuda has 7.5"),
    ],
)
@pytest.mark.parametrize("name", ["flash_attention_2", "varlen"])
def test_what_flash_kernels_cannot_run(offer, name, device, dtype, head_dim, capability, told):
    offer(True, True, capability)
    assert resolve("auto", device, dtype, head_dim).name == "sdpa"
    with pytest.raises(ValueError) as error:
        resolve(name, device, dtype, head_dim)
    assert f"{name!r} cannot be used: {told}" in str(error.value)
    assert str(error.value).endswith("Or use 'auto' or 'sdpa'.")


def test_rocm_gets_sdpa(offer, monkeypatch):
    offer(True, True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert available(CUDA, torch.bfloat16, 128) == ["sdpa"]


@pytest.mark.parametrize("name", ["flash_attention_2", "varlen"])
def test_missing_kernel_is_named_with_its_remedy(offer, name):
    offer(name != "flash_attention_2", name != "varlen")
    with pytest.raises(ValueError, match=f"{name!r} cannot be used: it is not there; get it. Or use 'auto' or"):
        resolve(name, CUDA, torch.bfloat16, 128)


def test_unknown_name():
    with pytest.raises(ValueError, match="'eager'; use 'auto' or one of 'flash_attention_2', 'varlen', 'sdpa'"):
        resolve("eager", CPU, torch.float32, 128)


def test_choice_is_logged_once(offer, caplog):
    offer(False, True)
    with caplog.at_level(logging.INFO, logger=segments.__name__):
        for _ in range(3):
            resolve("auto", CUDA, torch.bfloat16, 128)
        assert [record.getMessage() for record in caplog.records] == [
            "Segment attention on cuda in torch.bfloat16: varlen (flash_attention_2: it is not there; get it)"
        ]
        resolve("sdpa", CUDA, torch.bfloat16, 128)
        assert caplog.messages[1:] == ["Segment attention on cuda in torch.bfloat16: sdpa"]


def test_cpu_does_not_look_for_kernels(monkeypatch):
    def find_kernel():
        raise AssertionError("looked for")

    monkeypatch.setattr(flash, "find_kernel", find_kernel)
    monkeypatch.setattr(varlen, "find_kernel", find_kernel)
    assert resolve("auto", CPU, torch.float32, 64).name == "sdpa"
