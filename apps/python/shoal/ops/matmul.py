"""Products with quantised weights."""

from __future__ import annotations

from typing import Any

from shoal.ops._call import call


def matmul_nbits(
    *,
    A: Any,
    B: Any,
    scales: Any,
    zero_points: Any = None,
    g_idx: Any = None,
    bias: Any = None,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
    out: Any = None,
) -> Any:
    """Y = A * W^T + bias, W[n, k] = (code - zero) * scale of integers of 2, 3, 4 or 8 bits in blocks along K.

    Args:
        A: [..., K] float32, float16 or bfloat16 (T).
        B: [N, k_blocks, block_size * bits / 8] uint8, an LSB-first stream of codes; k_blocks = ceil(K / block_size).
        scales: [N, k_blocks] or flat, T.
        zero_points: uint8 [N, ceil(k_blocks * bits / 8)], or T [N, k_blocks]; None: 2 ** (bits - 1).
        g_idx: [K] int32, the block whose scale and zero a column takes.
        bias: [N] T.
        block_size: a power of two, at least 16.
        accuracy_level: 4 rounds A to int8 in blocks; 0 to 3 keep it.
        weight_prepacked: only 0.
        out: the memory of Y.

    Returns:
        Y [..., N] T.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.
        Unsupported: bits 5 to 7, weight_prepacked 1 and 2.

    Source: ONNX Runtime com.microsoft::MatMulNBits.
    """
    return call("matmul_nbits", locals())


def matmul_packed(
    *,
    A: Any,
    B: Any,
    global_scale: Any = None,
    packed_type: int | str,
    N: int,
    K: int,
    activation_type: str = "none",
    unrounded: bool = False,
    out: Any = None,
) -> Any:
    """Y = activation(A * W^T * global_scale) with the weights of GGUF blocks.

    Args:
        A: [..., K] float32, float16 or bfloat16 (T).
        B: [N, row_bytes] uint8.
        global_scale: one float32, rank 0 or [1]; NVFP4 only.
        packed_type: ggml's id or name, such as 12 or "Q4_K".
        K: whole blocks.
        activation_type: none, relu2 (relu_squared) or silu.
        unrounded: leaves the weights in float32 (up to 8 rows of A); an extension of ours.
        out: the memory of Y.

    Returns:
        Y [..., N] T.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.
        Unsupported: a type of ggml that is not listed.

    Source: ONNX Runtime com.microsoft::MatMulPacked.
    """
    return call("matmul_packed", locals())


def matmul_fp4(
    *,
    A: Any,
    B: Any,
    weight_scale: Any,
    weight_scale_2: Any,
    input_scale: Any = None,
    bias: Any = None,
    block_size: int = 16,
    out: Any = None,
) -> Any:
    """Y = A * W^T + bias with NVFP4 weights; N and K follow from B.

    Args:
        A: [..., K] float16 or bfloat16 (T).
        B: [N, K / 2] uint8, low nibble the even k (or [N, K] of `ml_dtypes.float4_e2m1fn`).
        weight_scale: [N, ceil(K / block_size)] float8_e4m3fn, or its bytes as uint8.
        weight_scale_2, input_scale: one float32, rank 0 or [1]; input_scale is checked and not used.
        bias: [N] T.
        out: the memory of Y.

    Returns:
        Y [..., N] T.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.

    Source: ONNX Runtime com.microsoft::MatMulBlockQuantizedFp4Weight.
    """
    return call("matmul_fp4", locals())


def matmul_fp8(
    *,
    A: Any,
    B: Any,
    b_scale: Any,
    a_scale: Any = None,
    bias: Any = None,
    block_size: int = 128,
    out: Any = None,
) -> Any:
    """Y = A' * W^T + bias with float8_e4m3fn weights; N and K follow from B.

    Args:
        A: [..., K] float16 or bfloat16 (T).
        B: [N, K] float8_e4m3fn.
        b_scale: [N, ceil(K / block_size)] float32.
        a_scale: one float32, rank 0 or [1]: A is rounded to float8_e4m3fn with this scale.
        bias: [N] T.
        out: the memory of Y.

    Returns:
        Y [..., N] T.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.

    Source: ONNX Runtime com.microsoft::MatMulBlockQuantizedFp8Weight.
    """
    return call("matmul_fp8", locals())
