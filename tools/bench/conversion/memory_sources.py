"""Checkpoints of every format that is read, of a given size, for `peak_memory.py`.

A state has fp32 matrices of 64 MiB, one of three eighths of all bytes, and two moments of an optimizer. A quantized
source has two weights whose values, as bfloat16, have about that many bytes. Numbers are random, because zeros and
repeated numbers take almost no memory in compressed chunks.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.conversion.formats.zero_folders import ZeroState, write_universal, write_zero
from vescale_fsdp.checkpoint import save
from vescale_fsdp.conversion import ConvertOptions, convert, open_source

Make = Callable[[Path, int], None]
COLUMNS = 4096
MATRIX_BYTES = 64 << 20
GROUP = 128  # values per scale
FP8 = torch.float8_e4m3fn


def _random(*shape: int) -> Tensor:
    """Random fp32 numbers; the same megabytes again and again, because making new ones takes seconds."""
    numel = math.prod(shape)
    block = torch.randn(min(numel, 1 << 20))
    return block.repeat(-(-numel // len(block)))[:numel].view(shape)


def _bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random bits of a dtype without NaNs: each byte is below 0x70."""
    item = torch.empty((), dtype=dtype).element_size()
    return (_random(*shape[:-1], shape[-1] * item).abs() * 30).clamp(max=111).to(torch.uint8).view(dtype)


def _rows(nbytes: int) -> int:
    """Rows of COLUMNS fp32 numbers; multiples of 128, because FP8 has a scale per block of 128 x 128."""
    return max(128, nbytes // (4 * COLUMNS) // 128 * 128)


def state_of(nbytes: int) -> dict[str, Any]:
    """One tensor of three eighths of the bytes, and smaller ones; some of them are an optimizer's."""
    large = _random(_rows(nbytes * 3 // 8), COLUMNS)
    count = max(4, (nbytes - large.nbytes) // MATRIX_BYTES)
    rest = [_random(_rows(min(MATRIX_BYTES, nbytes)), COLUMNS) for _ in range(count)]
    model = {"embed.weight": large, **{f"layers.{place}.weight": each for place, each in enumerate(rest[2:])}}
    moments = {"layers.0.weight": {"exp_avg": rest[0], "exp_avg_sq": rest[1]}}
    return {"model": model, "optimizer": {"state": moments}}


def _many(path: Path, nbytes: int) -> None:
    """Matrices of 64 KiB."""
    count = max(4, nbytes // 2**16)
    path.mkdir()
    save_file({f"layers.{n}.weight": _random(128, 128) for n in range(count)}, path / "model.safetensors")


def _strided(path: Path, nbytes: int) -> None:
    """Transposed matrices and expanded rows, as `torch.save` stores them: with their strides."""
    model = {name: tensor.t() for name, tensor in state_of(nbytes)["model"].items()}
    torch.save({**model, "bias": _random(COLUMNS).expand(8, COLUMNS)}, path)


def _bin(path: Path, nbytes: int) -> None:
    path.mkdir()
    torch.save(state_of(nbytes)["model"], path / "pytorch_model.bin")


def _shards(path: Path, nbytes: int) -> None:
    """Files of two ranks, as transformers 5 writes them."""
    path.mkdir()
    model = state_of(nbytes)["model"]
    for rank in range(2):
        part = {name: tensor.chunk(2)[rank].contiguous() for name, tensor in model.items()}
        file = path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        offsets = {
            name: {"saved_offsets": [rank * len(tensor) // 2, 0]} for name, tensor in model.items()
        }  # as torch's HuggingFaceStorageWriter notes them
        save_file(part, file, {"DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"})


def _save_rank_files(rank: int, folder: str, nbytes: int) -> None:
    """Worker: write one of two ranks' files of DTensors, as accelerate saves FSDP2's."""
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = state_of(nbytes)["model"]
    sharded = {name: distribute_tensor(model.pop(name), mesh, [Shard(0)]) for name in list(model)}
    torch.save(sharded, f"{folder}/pytorch_model_fsdp_rank{rank}.bin")
    dist.destroy_process_group()


def _rank_files(path: Path, nbytes: int) -> None:
    path.mkdir()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_save_rank_files, args=(rank, str(path), nbytes)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert all(each.exitcode == 0 for each in ranks)


def _arrays(version: int) -> Make:
    """Compressed zarr arrays: zstd, in chunks of 4 MiB."""

    def make(path: Path, nbytes: int) -> None:
        import zarr

        root = zarr.open_group(path, mode="w", zarr_format=version)
        for name, tensor in state_of(nbytes)["model"].items():
            chunks = (min(len(tensor), 256), COLUMNS)
            array = root.create_array(name, shape=tensor.shape, chunks=chunks, dtype="float32")
            array[:] = tensor.numpy()

    return make


def _ocdbt(version: int) -> Make:
    """Arrays in one OCDBT tree, as Orbax writes them."""

    def make(path: Path, nbytes: int) -> None:
        import tensorstore

        path.mkdir()
        tree, driver = {}, {2: "zarr", 3: "zarr3"}[version]
        for name, tensor in state_of(nbytes)["model"].items():
            store = {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}
            chunk = [min(len(tensor), 256), COLUMNS]
            array = tensorstore.open(
                {"driver": driver, "kvstore": store},
                create=True,
                dtype=tensorstore.float32,
                shape=list(tensor.shape),
                chunk_layout=tensorstore.ChunkLayout(chunk_shape=chunk),
            ).result()
            array[...] = tensor.numpy()
            key = [{"key": name, "key_type": 2}]
            tree[f"('{name}',)"] = {"key_metadata": key, "value_metadata": {"value_type": "jax.Array"}}
        (path / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_ocdbt": True}))

    return make


def _zero(stage: int, *, round_robin: bool = False) -> Make:
    def make(path: Path, nbytes: int) -> None:
        write_zero(path, _zero_state(nbytes, round_robin=round_robin), stage=stage, ranks=2)

    return make


def _universal(path: Path, nbytes: int) -> None:
    write_universal(path, _zero_state(nbytes), stage=3)


def _zero_state(nbytes: int, *, round_robin: bool = False) -> ZeroState:
    """A third of the bytes are masters; the weights of 16 bits come on top."""
    masters = {
        "embed.weight": _random(_rows(nbytes * 3 // 8), COLUMNS),
        "layers.0.weight": _random(_rows(nbytes // 4), COLUMNS),  # not a head, which is never quantized
    }
    moments = {name: {"exp_avg": t, "exp_avg_sq": t.abs()} for name, t in masters.items()}
    return ZeroState([masters], moments, [{"lr": 0.1}], round_robin=round_robin)


def _megatron(path: Path, nbytes: int) -> None:
    """Layers in a stack, next to an embedding."""
    model = state_of(nbytes)["model"]
    stack = torch.stack([_random(_rows(nbytes // 4), COLUMNS) for _ in range(3)])
    state = {
        "embedding.word_embeddings.weight": model["embed.weight"],
        "decoder.layers.mlp.linear_fc1.weight": stack,
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)
    torch.save({"iteration": 1}, path / "common.pt")


def _adapter(path: Path, nbytes: int) -> None:
    """A LoRA whose matrices are as large as weights."""
    path.mkdir()
    up, down = _random(_rows(nbytes * 3 // 8), COLUMNS), _random(COLUMNS, _rows(nbytes // 4))
    name = "base_model.model.layers.0.proj"
    tensors = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": COLUMNS, "lora_alpha": 16, "target_modules": ["proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))


def _from_torch(kind: str) -> Make:
    def make(path: Path, nbytes: int) -> None:
        file = path.with_suffix(".made")
        torch.save(state_of(nbytes), file)
        convert(open_source(str(file), kind="torch"), path, kind, ConvertOptions())
        file.unlink()

    return make


def _gguf(type_name: str) -> Make:
    def make(path: Path, nbytes: int) -> None:
        import gguf

        kind = gguf.GGMLQuantizationType[type_name]
        values, size = gguf.GGML_QUANT_SIZES[kind]
        writer = gguf.GGUFWriter(path, "llama")
        for number, rows in enumerate(_two(nbytes)):
            blocks = _bits(torch.uint8, rows, COLUMNS // values * size).numpy()
            writer.add_tensor(f"blk.{number}.weight", blocks, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return make


def _two(nbytes: int) -> tuple[int, int]:
    """Rows of a large and of a smaller quantized matrix, of 2 bytes per value."""
    return _rows(nbytes * 3 // 4), _rows(nbytes // 2)


# The tensors of a weight with so many rows, by the ends of their names.
Parts = Callable[[int], dict[str, Tensor]]


def _coded(settings: dict[str, Any], parts: Parts) -> Make:
    def make(path: Path, nbytes: int) -> None:
        path.mkdir()
        tensors: dict[str, Tensor] = {}
        described: dict[str, str] = {}
        for number, rows in enumerate(_two(nbytes)):
            own = parts(rows)
            tensors |= {f"layers.{number}.{end}": tensor for end, tensor in own.items()}
            if settings["quant_method"] == "torchao":
                described[f"layers.{number}.weight"] = _torchao_entry(own)
        if described:
            described["tensor_names"] = json.dumps(list(described))
        save_file(tensors, path / "model.safetensors", {"format": "pt", **described})
        (path / "config.json").write_text(json.dumps({"quantization_config": settings}))

    return make


def _torchao_entry(parts: dict[str, Tensor]) -> str:
    named = {"_type": "torch.dtype", "_data": "bfloat16"}
    names = [end.removeprefix("_weight_") for end in parts]
    facts = {"block_size": [1, GROUP], "dtype": named}
    return json.dumps({"_type": "Int4Tensor", "_data": facts, "_tensor_data_names": names})


def _nf4(rows: int) -> dict[str, Tensor]:
    runs = rows * COLUMNS // 64
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, COLUMNS]}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.7}
    return {
        "weight": _bits(torch.uint8, rows * COLUMNS // 2, 1),
        "weight.absmax": _bits(torch.uint8, runs),
        "weight.quant_map": torch.rand(16),
        "weight.nested_absmax": torch.rand(-(-runs // 256)),
        "weight.nested_quant_map": torch.rand(256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).byte(),
    }


def _gptq(rows: int, *, has_order: bool, columns: int = COLUMNS) -> dict[str, Tensor]:
    groups = rows // GROUP
    index = torch.arange(rows) // GROUP
    parts = {
        "qweight": _bits(torch.int32, rows // 8, columns),
        "qzeros": _bits(torch.int32, groups, columns // 8),
        "scales": torch.rand(groups, columns).half(),
    }
    return parts | ({"g_idx": index[torch.randperm(rows)].int()} if has_order else {})


def _integers(rows: int, *, has_index: bool = False) -> dict[str, Tensor]:
    groups = COLUMNS // GROUP
    index = {"weight_g_idx": (torch.arange(COLUMNS) // GROUP)[torch.randperm(COLUMNS)].int()}
    return {
        "weight_packed": _bits(torch.int32, rows, COLUMNS // 8),
        "weight_scale": torch.rand(rows, groups).bfloat16(),
        "weight_zero_point": _bits(torch.int32, rows // 8, groups),
        "weight_shape": torch.tensor([rows, COLUMNS]),
        **(index if has_index else {}),
    }


_CT = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
_NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}

# Converted with --dequantize.
QUANTIZED: dict[str, Make] = {
    "fp8": _coded(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda rows: {
            "weight": _bits(FP8, rows, COLUMNS),
            "weight_scale_inv": torch.rand(rows // 128, COLUMNS // 128),
        },
    ),
    "gptq": _coded(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP}, lambda rows: _gptq(rows, has_order=False)
    ),
    "gptq_desc_act": _coded(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP}, lambda rows: _gptq(rows, has_order=True)
    ),
    "gptq_wide": _coded(  # many outputs, few inputs
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
        lambda rows: _gptq(COLUMNS, has_order=True, columns=rows),
    ),
    "awq": _coded(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        lambda rows: {
            "qweight": _bits(torch.int32, rows, COLUMNS // 8),
            "qzeros": _bits(torch.int32, rows // GROUP, COLUMNS // 8),
            "scales": torch.rand(rows // GROUP, COLUMNS).half(),
        },
    ),
    "nf4": _coded({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4),
    "int8": _coded(
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        lambda rows: {"weight": _bits(torch.int8, rows, COLUMNS), "SCB": torch.rand(rows)},
    ),
    "compressed_int4": _coded(_CT, _integers),
    "compressed_index": _coded(_CT, lambda rows: _integers(rows, has_index=True)),
    "nvfp4": _coded(
        _NVFP4,
        lambda rows: {
            "weight_packed": _bits(torch.uint8, rows, COLUMNS // 2),
            "weight_scale": _bits(FP8, rows, COLUMNS // 16),
            "weight_global_scale": torch.tensor([713.5]),
        },
    ),
    "mxfp4": _coded(
        {"quant_method": "mxfp4"},
        lambda rows: {
            "experts_blocks": _bits(torch.uint8, 4, rows // 4, COLUMNS // 32, 16),
            "experts_scales": torch.full((4, rows // 4, COLUMNS // 32), 120, dtype=torch.uint8),
        },
    ),
    "torchao_int4": _coded(
        {"quant_method": "torchao"},
        lambda rows: {
            "_weight_qdata": _bits(torch.int8, rows, COLUMNS // 2),
            "_weight_scale": torch.rand(COLUMNS // GROUP, rows).bfloat16(),
            "_weight_zero_point": torch.rand(COLUMNS // GROUP, rows).bfloat16(),
        },
    ),
    "q4_k.gguf": _gguf("Q4_K"),
    "iq4_xs.gguf": _gguf("IQ4_XS"),
}

SOURCES: dict[str, Make] = {
    "dcp": lambda path, nbytes: dcp.save(state_of(nbytes), checkpoint_id=path, no_dist=True),
    "native": lambda path, nbytes: save(path, state_of(nbytes)),
    "hf": _from_torch("hf"),
    "many": _many,
    "torch": lambda path, nbytes: torch.save(state_of(nbytes), path),
    "strided": _strided,
    "bin": _bin,
    "shards": _shards,
    "ranks": _rank_files,
    "zarr": _from_torch("zarr"),
    "compressed": _arrays(3),
    "compressed_2": _arrays(2),
    "ocdbt": _ocdbt(2),
    "ocdbt_3": _ocdbt(3),
    "zero_1": _zero(1),
    "zero_2_round_robin": _zero(2, round_robin=True),
    "zero_3": _zero(3),
    "universal": _universal,
    "megatron": _megatron,
    "adapter": _adapter,
    **QUANTIZED,
}


def make(kind: str, path: Path, nbytes: int) -> None:
    """Write a source of a kind; other processes can import this function."""
    torch.manual_seed(0)
    SOURCES[kind](path, nbytes)
