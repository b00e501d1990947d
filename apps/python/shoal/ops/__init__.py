"""Every operator of shoal on arrays of numpy, torch and whatever else speaks DLPack.

    output, key_cache, value_cache = shoal.ops.paged_attention(query=q, key=k, value=v, key_cache=..., num_heads=32)

Inputs and attributes are keyword arguments under the names of the published schemas; what is optional defaults to None
or to the schema's default. The result is the outputs in order: one array when there is one output, else a tuple, with
None for one that does not apply. It is of the library that the inputs are of, all of one.

- KV caches are changed in place and returned; one without room is left alone, and a new one comes back. States are new
  arrays unless `out=` names memory.
- `out=` is one array or a tuple in output order, with None for a new array. A state's may be its own input.
- Views, strides and any offsets are legal. Inputs are copied where an operator needs them otherwise; what must be
  changed in place never is.
- bfloat16, float8 and float4 are torch tensors or numpy arrays of `ml_dtypes` types.
- A rejected call raises `InvalidArgument` (also a ValueError) that names the input or attribute, and writes nothing.
  What is not supported raises `Unsupported` naming it. A missing or unknown keyword is a TypeError.
- Calls run on SHOAL_THREADS threads (default: all cores), one at a time, without the interpreter lock.
"""

from __future__ import annotations

import inspect
from typing import Any

from shoal.errors import InvalidArgument
from shoal.ops._call import describe_variant
from shoal.ops.attention import paged_attention
from shoal.ops.convolution import causal_conv_with_state, varlen_causal_conv_with_state
from shoal.ops.experts import moe_group_router, moe_packed, moe_router, qmoe
from shoal.ops.formats import dequantize, quantize
from shoal.ops.indexers import packed_sparse_attention_indexer, sparse_attention_indexer
from shoal.ops.matmul import matmul_fp4, matmul_fp8, matmul_nbits, matmul_packed
from shoal.ops.recurrence import gated_delta_net, linear_attention, linear_attention_gate, mamba2_verify
from shoal.ops.selection import (
    gated_latent_pool,
    packed_sparse_attention_indexer_merge,
    sparse_attention_selection_merge,
    sparse_row_select,
)
from shoal.ops.sparse_attention import dynamic_sparse_attention, sparse_paged_attention

__all__ = [
    "causal_conv_with_state",
    "dequantize",
    "dynamic_sparse_attention",
    "explain",
    "gated_delta_net",
    "gated_latent_pool",
    "linear_attention",
    "linear_attention_gate",
    "mamba2_verify",
    "matmul_fp4",
    "matmul_fp8",
    "matmul_nbits",
    "matmul_packed",
    "moe_group_router",
    "moe_packed",
    "moe_router",
    "packed_sparse_attention_indexer",
    "packed_sparse_attention_indexer_merge",
    "paged_attention",
    "qmoe",
    "quantize",
    "sparse_attention_indexer",
    "sparse_attention_selection_merge",
    "sparse_paged_attention",
    "sparse_row_select",
    "varlen_causal_conv_with_state",
]


def explain(name: str, /, **arguments: Any) -> str:
    """Which variant of operator `name` would run with these arguments, and why the faster ones were passed over.

    Checks the call as the operator would (TypeError, InvalidArgument, Unsupported) and runs nothing.
    """
    function = globals().get(name) if name in __all__ else None
    if function is None or name in ("explain", "quantize", "dequantize"):
        raise InvalidArgument(f"explain: no operator {name!r}")
    bound = inspect.signature(function).bind(**arguments)
    bound.apply_defaults()
    return describe_variant(name, bound.arguments)
