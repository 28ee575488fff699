"""The compiled extension ``transformer_engine_torch`` in plain torch, for tests on a CPU.

Transformer Engine's Python code runs over it unmodified; ``install.py`` puts it in place of the shared object. It
serves releases 1.13 to 2.20.

What it computes is *some* valid fp8 rounding (to nearest even, saturating), and reference formulas for the rest. It
has never been compared to the CUDA kernels bit by bit, so nothing but "these are fp8 values of those numbers" may be
asserted of them. Three things are known to differ: the scales of delayed scaling stay what they are (1.0 at the
start), swizzled scales are never produced, and all arithmetic is fp32.

A name that is not here answers with an open enum (``CamelCase``, ``NVTE_...``) or with a function that raises
:class:`NotImplementedError` when it is called.
"""

from __future__ import annotations

import enum
import inspect
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Tensors = list[Tensor]

# --------------------------------------------------------------------------------------------------------------- enums


class _Member(int):
    """A member of an open enum."""


class _OpenEnum(enum.EnumMeta):
    """An enum that makes up the members it is asked for; ``__members__`` holds the declared ones only."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        member = _Member(1000 + sum(isinstance(value, _Member) for value in vars(cls).values()))
        type.__setattr__(cls, name, member)
        return member


class DType(enum.IntEnum):
    # From 2.16 on, constants.py asserts that there are exactly these names.
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class NVTE_Fused_Attn_Backend(enum.IntEnum, metaclass=_OpenEnum):
    # 2.20 asserts that there are exactly these names; earlier releases ask for one more.
    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class FP8FwdTensors(enum.IntEnum):
    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class FP8TensorMeta:
    """Scales and amax history of 1.x modules; the fields are set by the caller."""

    scale: Tensor
    scale_inv: Tensor
    amax_history: Tensor


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    made: Any
    if name[0].isupper():
        made = _OpenEnum(name, (enum.IntEnum,), _OpenEnum.__prepare__(name, (enum.IntEnum,)))
    else:

        def made(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in (tests/standins)")

    globals()[name] = made
    return made


_TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def _torch_dtype(dtype: Any) -> torch.dtype:
    # 2.16 and later have an enum of their own, equal to ours as an integer.
    return dtype if isinstance(dtype, torch.dtype) else _TORCH_DTYPES[DType(int(dtype))]


# ---------------------------------------------------------------------------------------------------------- fp8 values


def _to_bytes(values: Tensor, dtype: Any) -> Tensor:
    """fp32 *values* as the bytes of saturating fp8."""
    fp8 = _torch_dtype(dtype)
    limit = torch.finfo(fp8).max
    return values.clamp(-limit, limit).to(fp8).view(torch.uint8)


def _from_bytes(data: Tensor, dtype: Any) -> Tensor:
    return data.view(_torch_dtype(dtype)).float()


def _amax(values: Tensor) -> Tensor:
    return values.abs().max() if values.numel() else values.new_zeros(())


def _raise_to(amax: Tensor, least: Tensor) -> None:
    amax.copy_(torch.maximum(amax, least))


def _scale(amax: Tensor, limit: float, epsilon: float, power_of_two: bool) -> Tensor:
    """The factor that takes *amax* to *limit*; 1 where there is none."""
    amax = amax.float().clamp(min=epsilon)
    scale = (limit / amax).clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where((amax == 0) | ~amax.isfinite(), torch.ones_like(scale), scale)
    if power_of_two:
        # Without its mantissa, a float is a power of two, rounded down.
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def _e8m0(amax: Tensor) -> Tensor:
    """The biased exponent (uint8) of the smallest power of two times which 448 reaches *amax*."""
    bits = (amax.float() / 448.0).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return exponent.clamp(0, 254).to(torch.uint8)


def _power(exponent: Tensor, sign: int = 1) -> Tensor:
    """2 to the power of a biased exponent, or of its negative."""
    return torch.ldexp(torch.ones(()), sign * (exponent.int() - 127))


def _grid_amax(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """The amax of every block of a matrix; blocks at the far edges may be cut off."""
    rows, columns = (math.ceil(size / step) for size, step in zip(matrix.shape, block, strict=True))
    padded = matrix.new_zeros(rows * block[0], columns * block[1])
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.abs().view(rows, block[0], columns, block[1]).amax(dim=(1, 3))


def _spread(grid: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """A value per block as a value per element of a matrix of *shape*; *grid* may be padded."""
    return grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _write_grid(target: Tensor, grid: Tensor) -> None:
    target.zero_()
    target[: grid.shape[0], : grid.shape[1]] = grid


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    transposed = _matrix(data).t().contiguous().view(data.shape[-1], *data.shape[:-1])
    return transposed if out is None else out.copy_(transposed)


# ---------------------------------------------------------------------------------------- quantizers and their tensors

_FAMILIES = {
    "Float8Quantizer": ("float8_tensor", "Float8Tensor"),
    "Float8CurrentScalingQuantizer": ("float8_tensor", "Float8Tensor"),
    "MXFP8Quantizer": ("mxfp8_tensor", "MXFP8Tensor"),
    "Float8BlockQuantizer": ("float8_blockwise_tensor", "Float8BlockwiseQTensor"),
}


def _build(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, data: dict[str, Any]) -> Any:
    """The quantizer's tensor, or its bare storage if the quantizer is internal, around *data*."""
    module, name = _FAMILIES[type(quantizer).__name__]
    tensor_class = getattr(sys.modules[f"transformer_engine.pytorch.tensor.{module}"], name)
    storage_class = tensor_class.__bases__[0]
    known = inspect.signature(storage_class.__new__).parameters
    for argument, value in {
        "is_2D_scaled": getattr(quantizer, "block_scaling_dim", None) == 2,
        "with_gemm_swizzled_scales": False,
        "fake_dtype": dtype,
    }.items():
        if argument in known:
            data[argument] = value
    if "data_format" in known:
        data["data_format"] = sys.modules[__name__].Float8BlockScaleTensorFormat.GEMM_READY
    data.update(fp8_dtype=quantizer.dtype, quantizer=quantizer)
    return storage_class(**data) if quantizer.internal else tensor_class(shape=shape, dtype=dtype, **data)


def _round_up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _empty_buffers(quantizer: Any, shape: Sequence[int], columnwise: bool) -> tuple[Tensor, Tensor]:
    """Data and inverse scales of one orientation, of a quantizer that scales blocks."""
    if type(quantizer).__name__ == "Float8BlockQuantizer":
        if getattr(quantizer, "all_gather_usage", False):
            raise NotImplementedError("no stand-in for the compact layout of blockwise tensors (all-gather)")
        data_shape = quantizer.get_columnwise_shape(shape) if columnwise else shape
        scale_shape = quantizer.get_scale_shape(shape, columnwise)
        return torch.empty(tuple(data_shape), dtype=torch.uint8), torch.ones(scale_shape)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if rows % 32 or columns % 32:
        raise ValueError(f"MXFP8 needs sizes that are multiples of 32, found {tuple(shape)}")
    scale_shape = (
        (_round_up(rows // 32, 4), _round_up(columns, 128))
        if columnwise
        else (_round_up(rows, 128), _round_up(columns // 32, 4))
    )
    return torch.empty(tuple(shape), dtype=torch.uint8), torch.zeros(scale_shape, dtype=torch.uint8)


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = None, pin_memory: bool = False
) -> Any:
    shape = torch.Size(shape)
    if type(quantizer).__name__ not in _FAMILIES:
        raise NotImplementedError(f"{type(quantizer).__name__} has no stand-in (tests/standins)")
    if _FAMILIES[type(quantizer).__name__][1] == "Float8Tensor":
        data = torch.empty(shape, dtype=torch.uint8)
        return _build(
            quantizer,
            shape,
            dtype,
            {
                "data": data if quantizer.rowwise_usage else None,
                "fp8_scale_inv": torch.ones(1),
                "data_transpose": fp8_transpose(data, None) if quantizer.columnwise_usage else None,
            },
        )
    buffers: dict[str, Any] = {}
    for side, columnwise in (("rowwise", False), ("columnwise", True)):
        used = quantizer.columnwise_usage if columnwise else quantizer.rowwise_usage
        made = _empty_buffers(quantizer, shape, columnwise) if used else (None, None)
        buffers[f"{side}_data"], buffers[f"{side}_scale_inv"] = made
    return _build(quantizer, shape, dtype, buffers)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """*tensor* quantized, into *output* if there is one; nothing happens if *noop* is set."""
    if output is None:
        output = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype)
    elif noop is not None and noop.item():
        return output
    values = tensor.detach().float()
    name = type(quantizer).__name__
    if name == "Float8Quantizer":
        # Callers that want no amax pass an empty one.
        if quantizer.amax.numel():
            _raise_to(quantizer.amax, _amax(values))
        _fill_float8(quantizer, values, output, quantizer.scale)
    elif name == "Float8CurrentScalingQuantizer":
        amax = _amax(values)
        if getattr(quantizer, "with_amax_reduction", False):
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())
        limit = torch.finfo(_torch_dtype(quantizer.dtype)).max
        scale = _scale(amax, limit, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
        if hasattr(quantizer, "amax"):
            # Buffers of the quantizer, in early releases.
            quantizer.amax.copy_(amax)
            quantizer.scale.copy_(scale)
        _fill_float8(quantizer, values, output, scale)
    elif name == "MXFP8Quantizer":
        _fill_blocks(quantizer, values, output, _fill_mxfp8)
    elif name == "Float8BlockQuantizer":
        _fill_blocks(quantizer, values, output, _fill_blockwise)
    else:
        raise NotImplementedError(f"{name} has no stand-in (tests/standins)")
    return output


def _fill_float8(quantizer: Any, values: Tensor, output: Any, scale: Tensor) -> None:
    data = _to_bytes(values * scale.view(()), quantizer.dtype)
    output._scale_inv.copy_(scale.reciprocal().view(output._scale_inv.shape))
    if quantizer.rowwise_usage:
        # In place: the bytes may lie in a parameter buffer of megatron-core.
        output._data = data if output._data is None else output._data.copy_(data.view(output._data.shape))
    output._transpose = fp8_transpose(data, None, out=output._transpose) if quantizer.columnwise_usage else None
    output._transpose_invalid = output._transpose is None


def _fill_blocks(quantizer: Any, values: Tensor, output: Any, fill: Any) -> None:
    for side, columnwise in (("rowwise", False), ("columnwise", True)):
        data, scale_inv = f"_{side}_data", f"_{side}_scale_inv"
        if not (quantizer.columnwise_usage if columnwise else quantizer.rowwise_usage):
            setattr(output, data, None)
            setattr(output, scale_inv, None)
            continue
        if getattr(output, data) is None:
            made, made_scale_inv = _empty_buffers(quantizer, values.shape, columnwise)
            setattr(output, data, made)
            setattr(output, scale_inv, made_scale_inv)
        fill(quantizer, values, getattr(output, data), getattr(output, scale_inv), columnwise)


def _fill_mxfp8(quantizer: Any, values: Tensor, data: Tensor, scale_inv: Tensor, columnwise: bool) -> None:
    matrix, block = _matrix(values), (32, 1) if columnwise else (1, 32)
    exponents = _e8m0(_grid_amax(matrix, block))
    _write_grid(scale_inv, exponents)
    factors = _spread(_power(exponents, -1), block, matrix.shape)
    data.copy_(_to_bytes(matrix * factors, quantizer.dtype).view(data.shape))


def _fill_blockwise(quantizer: Any, values: Tensor, data: Tensor, scale_inv: Tensor, columnwise: bool) -> None:
    matrix, size = _matrix(values), quantizer.block_len
    square = quantizer.block_scaling_dim == 2
    block = (size, size) if square else (size, 1) if columnwise else (1, size)
    limit = torch.finfo(_torch_dtype(quantizer.dtype)).max
    scale = _scale(_grid_amax(matrix, block), limit, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    # Scales lie as the matrix product reads them: of vectors, with the blocks first; of squares, as the data.
    _write_grid(scale_inv, scale.reciprocal().t() if columnwise == square else scale.reciprocal())
    result = _to_bytes(matrix * _spread(scale, block, matrix.shape), quantizer.dtype)
    data.copy_((result.t() if columnwise else result).reshape(data.shape))


def dequantize(tensor: Any, dtype: Any = DType.kFloat32) -> Tensor:
    return _values(tensor).to(_torch_dtype(dtype))


def _values(tensor: Any) -> Tensor:
    """The fp32 values of a plain or a quantized tensor, or of a bare storage, in the shape of the tensor."""
    if hasattr(tensor, "_is_2D_scaled"):
        # Transformer Engine's own, in plain torch.
        return tensor.dequantize(dtype=torch.float32)
    if hasattr(tensor, "_rowwise_scale_inv"):
        return _mxfp8_values(tensor)
    if hasattr(tensor, "_scale_inv"):
        if tensor._data is not None:
            return _from_bytes(tensor._data, tensor._fp8_dtype) * tensor._scale_inv.view(())
        values = _from_bytes(tensor._transpose, tensor._fp8_dtype) * tensor._scale_inv.view(())
        return values.permute(*range(1, values.dim()), 0)
    return tensor.detach().float()


def _mxfp8_values(tensor: Any) -> Tensor:
    columnwise = tensor._rowwise_data is None
    data = tensor._columnwise_data if columnwise else tensor._rowwise_data
    exponents = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    values = _matrix(_from_bytes(data, tensor._fp8_dtype))
    return (values * _spread(_power(exponents), (32, 1) if columnwise else (1, 32), values.shape)).view(data.shape)


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return _matrix(grad).float().sum(0).to(grad.dtype), quantize(grad, quantizer)


def split_quantize(tensor: Tensor, splits: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
    parts = tensor.split(list(splits))
    return [quantize(part.contiguous(), quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def fused_multi_quantize(tensors: Tensors, outputs: Any, quantizers: Sequence[Any], dtype: Any) -> list[Any]:
    outputs = outputs or [None] * len(tensors)
    return [quantize(*each) for each in zip(tensors, quantizers, outputs, strict=True)]


def rowwise_swizzle(data: Tensor, scale_inv: Tensor) -> Tensor:
    return scale_inv


columnwise_swizzle = rowwise_swizzle


def fused_amax_and_scale_update_after_reduction(*_: Any) -> None:
    """Leaves the scales of delayed scaling alone; see the module."""


# ---------------------------------------------------------------------------------------- masters to quantized weights


def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    amax.fill_(_amax(tensor.float()))


def _within(shard: Tensor, height: int, width: int, start: int) -> Tensor:
    """A matrix that is zero but for *shard*, which lies at *start* of the flattened matrix."""
    whole = torch.zeros(height * width)
    whole[start : start + shard.numel()] = shard.reshape(-1).float()
    return whole.view(height, width)


def fp8_block_scaling_compute_partial_amax(
    shard: Tensor, amax: Tensor, height: int, width: int, start: int, block_len: int
) -> None:
    _write_grid(amax, _grid_amax(_within(shard, height, width, start), (block_len, block_len)))


def fp8_block_scaling_partial_cast(
    shard: Tensor, out: Tensor, scale: Tensor, height: int, width: int, start: int, block_len: int, dtype: Any
) -> None:
    factors = _spread(scale, (block_len, block_len), (height, width)).reshape(-1)[start : start + shard.numel()]
    out.copy_(_to_bytes(shard.float() * factors, dtype))


def mxfp8_scaling_compute_partial_amax(
    shard: Tensor, rowwise: Tensor, columnwise: Tensor, height: int, width: int, start: int
) -> None:
    matrix = _within(shard, height, width, start)
    _write_grid(rowwise, _grid_amax(matrix, (1, 32)))
    _write_grid(columnwise, _grid_amax(matrix, (32, 1)))


def mxfp8_scaling_partial_cast(
    shard: Tensor,
    rowwise: Tensor,
    columnwise: Tensor,
    rowwise_scale_inv: Tensor,
    columnwise_scale_inv: Tensor,
    height: int,
    width: int,
    start: int,
) -> None:
    for out, exponents, block in ((rowwise, rowwise_scale_inv, (1, 32)), (columnwise, columnwise_scale_inv, (32, 1))):
        factors = _spread(_power(exponents, -1), block, (height, width)).reshape(-1)[start : start + shard.numel()]
        out.copy_(_to_bytes(shard.float() * factors, DType.kFloat8E4M3))


# ----------------------------------------------------------------------------------------------------- matrix products


def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Tensor | None, quantizer: Any, out_dtype: Any, bias: Tensor | None,
    *settings: Any, comm_overlap: Any = None, alpha: float = 1.0, beta: float | None = None, **_: Any,
) -> tuple[Any, Any, None, None]:  # fmt: skip
    """``op(b) @ op(a)``; with *grad*, the bias' gradient is the sum over the rows of *b*."""
    _bias_dtype, gelu, _gelu_in, grad, _workspace, _workspace_size, accumulate, _split_accumulator = settings
    if gelu or comm_overlap is not None:
        raise NotImplementedError("no stand-in for a matrix product with gelu or with overlapped communication")
    left, right = _matrix(_values(b)), _matrix(_values(a))
    result = alpha * ((left.t() if transb else left) @ (right.t() if transa else right))
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = left.sum(0).to(bias.dtype)
        else:
            result = result + bias.detach().float()
    if accumulate:
        assert out is not None
        result = result + (1.0 if beta is None else beta) * out.float().view(result.shape)
    if not transb:
        result = result.view(*b.size()[:-1], result.shape[-1])
    if out is not None:
        return out.copy_(result.view(out.shape)), bias_grad, None, None
    if out_dtype is not None:
        result = result.to(_torch_dtype(out_dtype))
    elif isinstance(b, Tensor):
        result = result.to(b.dtype)
    return (result if quantizer is None else quantize(result, quantizer)), bias_grad, None, None


def te_general_grouped_gemm(
    a: list[Any], transa: bool, b: list[Any], transb: bool, out: Tensors, out_dtype: Any, m_splits: list[int],
    bias: Tensors, bias_dtype: Any, single_output: bool, pre_gelu_out: Tensors, grad: bool, *settings: Any,
) -> Tensors:  # fmt: skip
    workspace, workspace_size, accumulate, split_accumulator, *_ = settings
    common = (bias_dtype, False, None, grad, workspace, workspace_size, accumulate, split_accumulator)
    outputs = list(out[0].split(list(m_splits))) if single_output else out
    for one_a, one_b, one_out, one_bias in zip(a, b, outputs, bias, strict=True):
        product = generic_gemm(one_a, transa, one_b, transb, one_out, None, out_dtype, one_bias, *common)
        if product[1] is not None:
            one_bias.copy_(product[1])
    return bias


def fused_multi_row_padding(source: Tensor, out: Tensor, splits: Sequence[int], padded: Sequence[int]) -> None:
    out.zero_()
    for rows, room in zip(source.split(list(splits)), out.split(list(padded)), strict=True):
        room[: len(rows)] = rows


def fused_multi_row_unpadding(source: Tensor, out: Tensor, padded: Sequence[int], splits: Sequence[int]) -> None:
    for room, rows in zip(source.split(list(padded)), out.split(list(splits)), strict=True):
        rows.copy_(room[: len(rows)])


# --------------------------------------------------------------------------------------------------------------- norms


def _finish_norm(result: Tensor, out: Any, quantizer: Any, dtype: Any) -> Any:
    result = result.to(_torch_dtype(dtype))
    if quantizer is not None:
        return quantize(result, quantizer, out)
    return result if out is None else out.copy_(result)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.detach().float() + (1.0 if zero_centered else 0.0)


def layernorm_fwd(
    source: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, Tensor, Tensor]:
    values = source.detach().float()
    mean = values.mean(-1)
    rsigma = (values.var(-1, correction=0) + eps).rsqrt()
    normed = (values - mean[..., None]) * rsigma[..., None]
    result = normed * _gamma(weight, zero_centered) + bias.detach().float()
    return _finish_norm(result, out, quantizer, dtype), mean, rsigma


def rmsnorm_fwd(
    source: Tensor,
    weight: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, None, Tensor]:
    values = source.detach().float()
    rsigma = (values.square().mean(-1) + eps).rsqrt()
    result = values * rsigma[..., None] * _gamma(weight, zero_centered)
    return _finish_norm(result, out, quantizer, dtype), None, rsigma


def layernorm_bwd(
    grad: Tensor, source: Tensor, mean: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad32 = grad.detach().float().view(source.shape)
    normed = (source.detach().float() - mean[..., None]) * rsigma[..., None]
    inner = grad32 * _gamma(weight, zero_centered)
    along = inner - inner.mean(-1, keepdim=True) - normed * (inner * normed).mean(-1, keepdim=True)
    dgamma, dbeta = _matrix(grad32 * normed).sum(0), _matrix(grad32).sum(0)
    return (along * rsigma[..., None]).to(source.dtype), dgamma.to(weight.dtype), dbeta.to(weight.dtype)


def rmsnorm_bwd(
    grad: Tensor, source: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    grad32 = grad.detach().float().view(source.shape)
    normed = source.detach().float() * rsigma[..., None]
    inner = grad32 * _gamma(weight, zero_centered)
    along = inner - normed * (inner * normed).mean(-1, keepdim=True)
    return (along * rsigma[..., None]).to(source.dtype), _matrix(grad32 * normed).sum(0).to(weight.dtype)


# -------------------------------------------------------------------------------------------- lists of tensors at once


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: list[Tensors], scale: Any) -> None:
    for source, target in zip(*lists, strict=True):
        scaled = source.float() * scale
        if not scaled.isfinite().all():
            overflow.fill_(1)
        target.copy_(scaled)


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: list[Tensors], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().view(1), norms if per_tensor else torch.empty(0)


def multi_tensor_unscale_l2norm(
    chunk: int, overflow: Tensor, lists: list[Tensors], inv_scale: Any, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    norms, each = multi_tensor_l2norm(chunk, overflow, lists, per_tensor)
    return norms * inv_scale, each * inv_scale


def multi_tensor_compute_scale_and_scale_inv(
    chunk: int, overflow: Any, lists: list[Tensors], limit: float, power_of_two: bool, epsilon: float
) -> None:
    for amax, scale, scale_inv in zip(*lists, strict=True):
        scale.copy_(_scale(amax, limit, epsilon, power_of_two))
        scale_inv.copy_(scale.reciprocal())


def multi_tensor_compute_scale_inv_e8m0(chunk: int, overflow: Any, lists: list[Tensors], *_: Any) -> None:
    for amax, scale_inv in zip(*lists, strict=True):
        scale_inv.copy_(_e8m0(amax))


def _adam(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *settings: Any) -> Tensor:
    """Updates both moments in place; returns *master* (fp32) after the step."""
    lr, beta1, beta2, eps, step, decoupled, bias_correction, weight_decay = settings
    grad = grad.float()
    if not decoupled:
        grad = grad + weight_decay * master
    mean = beta1 * exp_avg.float() + (1 - beta1) * grad
    square = beta2 * exp_avg_sq.float() + (1 - beta2) * grad * grad
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    if bias_correction:
        mean, square = mean / (1 - beta1**step), square / (1 - beta2**step)
    update = mean / (square.sqrt() + eps)
    if decoupled:
        update = update + weight_decay * master
    return master - lr * update


def multi_tensor_adam(chunk: int, overflow: Tensor, lists: list[Tensors], *settings: Any) -> None:
    """Lists: gradients, parameters, first and second moments, and masters if they are held apart."""
    for grad, parameter, exp_avg, exp_avg_sq, *master in zip(*lists, strict=True):
        before = master[0] if master else parameter.float()
        after = _adam(before, grad, exp_avg, exp_avg_sq, *settings)
        parameter.copy_(after)
        for held in master:
            held.copy_(after)


def multi_tensor_adam_param_remainder(chunk: int, overflow: Any, lists: list[Tensors], *settings: Any) -> None:
    """A bf16 parameter is the high half of its master, rounded half away; the last list holds the low halves."""
    for grad, parameter, exp_avg, exp_avg_sq, low in zip(*lists, strict=True):
        high = parameter.view(torch.int16).int() - (low < 0).int()
        before = ((high << 16) | (low.int() & 0xFFFF)).view(torch.float32)
        bits = _adam(before, grad, exp_avg, exp_avg_sq, *settings).view(torch.int32)
        low.copy_(bits.to(torch.int16))
        parameter.view(torch.int16).copy_(((bits >> 16) + (low < 0).int()).to(torch.int16))


def multi_tensor_adam_fp8(chunk: int, overflow: Any, lists: list[Tensors], *settings: Any) -> None:
    *settings_, dtype = settings
    for grad, data, exp_avg, exp_avg_sq, master, scale, amax, scale_inv in zip(*lists, strict=True):
        if master.dtype is not torch.float32:
            # The kernel checks it too, from 2.10 on at the latest.
            raise RuntimeError(f"masters of fp8 parameters must be fp32, found {master.dtype}")
        master.copy_(_adam(master, grad, exp_avg, exp_avg_sq, *settings_))
        _raise_to(amax, _amax(master))
        scale_inv.copy_(scale.reciprocal())
        data.copy_(_to_bytes(master * scale.view(()), dtype))


# ------------------------------------------------------------------------------------- releases 1.x; facts and figures


def _behind(tensor: Tensor, offset: int) -> Tensor:
    """The element (0-d) *offset* places behind the tensor's address: a kernel does not ask for strides."""
    return tensor.as_strided((), (), tensor.storage_offset() + offset)


def fused_cast_transpose_noop(
    source: Tensor,
    noop: Tensor,
    scale: Tensor,
    amax: Tensor,
    scale_inv: Tensor,
    out: Tensor,
    transposed: Tensor,
    dtype: Any,
    *,
    scale_offset: int = 0,
    amax_offset: int = 0,
    scale_inv_offset: int = 0,
) -> None:
    if noop.numel() and noop.item():
        return
    values, factor = source.float(), _behind(scale, scale_offset)
    _raise_to(_behind(amax, amax_offset), _amax(values))
    _behind(scale_inv, scale_inv_offset).copy_(factor.reciprocal())
    out.copy_(_to_bytes(values * factor, dtype))
    transposed.copy_(out.t())


def fp8_transpose_noalloc(data: Tensor, out: Tensor, dtype: Any) -> None:
    fp8_transpose(data, dtype, out=out)


def fp8_transpose_noalloc_noop(data: Tensor, out: Tensor, noop: Tensor, dtype: Any) -> None:
    if not noop.item():
        fp8_transpose(data, dtype, out=out)


def _register_1x_operators() -> Any:
    """The operators by which 1.x casts tensors. Its forward pass needs dozens more, which have no stand-in."""

    def cast_to_fp8_noalloc_ts(
        source: Tensor, scale: Tensor, out: Tensor, amax: Tensor, scale_inv: Tensor, index: int, dtype: int
    ) -> Tensor:
        values, factor = source.float(), _behind(scale, index)
        _raise_to(_behind(amax, index), _amax(values))
        _behind(scale_inv, index).copy_(factor.reciprocal())
        return out.copy_(_to_bytes(values * factor, dtype).view(out.shape))

    def cast_to_fp8_ts(
        source: Tensor, scale: Tensor, amax: Tensor, scale_inv: Tensor, index: int, dtype: int
    ) -> Tensor:
        out = torch.empty_like(source, dtype=torch.uint8)
        return cast_to_fp8_noalloc_ts(source, scale, out, amax, scale_inv, index, dtype)

    def cast_from_fp8_ts(source: Tensor, scale_inv: Tensor, index: int, source_dtype: int, dtype: int) -> Tensor:
        return (_from_bytes(source, source_dtype) * scale_inv[index]).to(_torch_dtype(dtype))

    library = torch.library.Library("tex_ts", "DEF")
    tail = "int index, int dtype) -> Tensor"
    library.define(
        f"cast_to_fp8_noalloc_ts(Tensor source, Tensor scale, Tensor out, Tensor amax, Tensor scale_inv, {tail}"
    )
    library.define(f"cast_to_fp8_ts(Tensor source, Tensor scale, Tensor amax, Tensor scale_inv, {tail}")
    library.define(
        "cast_from_fp8_ts(Tensor source, Tensor scale_inv, int index, int source_dtype, int dtype) -> Tensor"
    )
    for function in (cast_to_fp8_noalloc_ts, cast_to_fp8_ts, cast_from_fp8_ts):
        library.impl(function.__name__, function, "CompositeExplicitAutograd")
    return library


# The operators live as long as this object.
_operators = _register_1x_operators()


def get_fused_attn_backend(*_: Any, **__: Any) -> NVTE_Fused_Attn_Backend:
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend


def get_cublasLt_version() -> int:
    return 130000


def get_cudnn_version() -> int:
    return 91500


def get_num_cublas_streams() -> int:
    return 4


_num_cublas_streams = 4


def get_stream_priority_range(*_: Any) -> tuple[int, int]:
    return (0, 0)


def device_supports_multicast(*_: Any) -> bool:
    return False
