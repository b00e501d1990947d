"""Quantised mixtures of experts and their routers."""

from __future__ import annotations

from typing import Any

from shoal.ops._call import call


def qmoe(
    *,
    input: Any,
    router_probs: Any,
    fc1_experts_weights: Any,
    fc1_scales: Any = None,
    fc1_experts_bias: Any = None,
    fc2_experts_weights: Any,
    fc2_scales: Any = None,
    fc2_experts_bias: Any = None,
    fc3_experts_weights: Any = None,
    fc3_scales: Any = None,
    fc3_experts_bias: Any = None,
    fc1_zero_points: Any = None,
    fc2_zero_points: Any = None,
    fc3_zero_points: Any = None,
    router_weights: Any = None,
    fc1_global_scale: Any = None,
    fc2_global_scale: Any = None,
    fc1_act_scale: Any = None,
    fc2_act_scale: Any = None,
    fc1_act_block_scale: Any = None,
    fc2_act_block_scale: Any = None,
    k: int = 1,
    activation_type: str = "relu",
    normalize_routing_weights: int = 0,
    use_sparse_mixer: int = 0,
    num_shared_experts: int = 0,
    swiglu_fusion: int = 0,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
    quant_type: str = "int",
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None,
    fc2_expert_weight_bits: int | None = None,
    fc3_expert_weight_bits: int | None = None,
    block_size: int | None = None,
    weights_prepacked: int = -1,
    accuracy_level: int = 0,
    row_tile_size: int = 0,
    out: Any = None,
) -> Any:
    """Mixture of experts: each token goes through the k experts its router chooses; their outputs are added up.

    Sizes: H the width of `input`, I that between FC1 and FC2, E experts, N rows of FC1 (I, or 2 I where gate and value
    are fused), K the width of a weight's rows, T the type of `input` (float32, float16, bfloat16).

    Args:
        input: [num_tokens, H] or [B, L, H] T.
        router_probs: [num_tokens, E] T, logits.
        fc1_experts_weights, fc2_experts_weights, fc3_experts_weights: [E, N, ...] by quant_type: int uint8
            [E, N, ceil(bits K / 8)], LSB-first codes; fp8 float8_e4m3fn [E, N, K]; fp4, wfp4afp8, nvfp4 uint8
            [E, K, N / 2], or with weights_prepacked 1 the bytes of [E, N, K / 2].
        fc1_scales, fc2_scales, fc3_scales: int T [E, N] or [E, N, K / block_size]; fp8 in blocks [E, ceil(N / bs),
            ceil(K / bs)] or per row; fp4 float8_e8m0fnu [E, N, K / 32]; nvfp4 float8_e4m3fn [E, N, K / 16].
        fc1_experts_bias, fc2_experts_bias, fc3_experts_bias: [E, N] T.
        fc1_zero_points, fc2_zero_points, fc3_zero_points: uint8, int in blocks only; None: 2 ** (bits - 1).
        router_weights: [num_tokens, E] T, values to mix with; the choice stays with router_probs.
        fc1_global_scale, fc2_global_scale: [E] float32.
        fc1_act_scale, fc2_act_scale, fc1_act_block_scale, fc2_act_block_scale: wfp4afp8 only; checked, not used.
        k: experts of a token.
        activation_type: relu, gelu, silu, swiglu, identity, relu2, geglu.
        normalize_routing_weights, use_sparse_mixer: how the weights of the chosen follow from the logits.
        num_shared_experts: the last experts, always chosen; an extension of ours.
        swiglu_fusion: 0 FC3 is the value (without FC3: 1), 1 rows of gate and value alternate, 2 one after the other.
        activation_alpha, activation_beta, swiglu_limit, swiglu_limit_after_activation: constants of swiglu.
        quant_type: int, fp8, fp4, nvfp4, wfp4afp8.
        expert_weight_bits, fc1_expert_weight_bits, fc2_expert_weight_bits, fc3_expert_weight_bits: int: 2, 3, 4, 8.
        block_size: values along K that share a scale; None or <= 0: one scale a row (int, fp8).
        accuracy_level, row_tile_size: never change a result.
        out: the memory of the output; may be `input` itself.

    Returns:
        The output, of the shape and type of `input`.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.
        Unsupported: names what this build has no path for.

    Source: ONNX Runtime com.microsoft::QMoE.
    """
    return call("qmoe", locals())


def moe_packed(
    *,
    input: Any,
    router_probs: Any,
    gate_experts_weights: Any,
    up_experts_weights: Any = None,
    down_experts_weights: Any,
    router_weights: Any = None,
    gate_type: int | str,
    up_type: int | str = -1,
    down_type: int | str,
    activation_type: str = "swiglu",
    k: int = 1,
    normalize_routing_weights: int = 1,
    routing_epsilon: float = 0.0,
    routed_scaling_factor: float = 1.0,
    out: Any = None,
) -> Any:
    """Mixture of experts with weights in GGUF blocks.

    Args:
        input: [..., H] float32, float16 or bfloat16.
        router_probs: [num_rows, E] logits, any of these types.
        gate_experts_weights, up_experts_weights: uint8 [E, I, row bytes of H values]; `up` with swiglu only.
        down_experts_weights: uint8 [E, H, row bytes of I values].
        router_weights: as router_probs, values to mix with.
        gate_type, up_type, down_type: ggml's ids or names, such as 12 or "Q4_K".
        activation_type: swiglu or relu2 (relu_squared).
        k: 1 to 16; with router_weights 1 to 32.
        normalize_routing_weights, routing_epsilon, routed_scaling_factor: the weights of the chosen; the last two only
            with router_weights.
        out: the memory of the output; may be `input` itself.

    Returns:
        The output, of the shape and type of `input`. A token with a weight that is not finite is NaN.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.
        Unsupported: a type of ggml that is not listed.

    Source: ONNX Runtime com.microsoft::MoEPacked.
    """
    return call("moe_packed", locals())


def moe_router(
    *,
    scores: Any,
    bias: Any = None,
    expert_ids: Any = None,
    topk: int = 1,
    local_expert_start: int = 0,
    local_expert_count: int,
    route_scale: float = 1.0,
    scoring: str = "sqrt_softplus",
    selection: str = "noaux_tc",
    dtype: Any = "float32",
    out: Any = None,
) -> tuple[Any, Any]:
    """Router with sqrt(softplus) scores, for the experts that are on this device.

    Args:
        scores: [num_tokens, E] float32.
        bias: [E] float32, added for the choice alone; with selection noaux_tc only.
        expert_ids: [num_tokens, topk] int64, takes the choice's place.
        topk: 1 to 32.
        local_expert_start, local_expert_count: the experts of this device.
        route_scale: multiplies weight_scale.
        scoring: sqrt_softplus. selection: noaux_tc or topk.
        dtype: the type of router_probs: a name, or a numpy or torch type (float32, float16, bfloat16).
        out: (router_probs, weight_scale), None for new arrays.

    Returns:
        (router_probs [num_tokens, local_expert_count]: log of the weight, -1e30 (float16: -1e4) where not chosen,
        weight_scale [num_tokens, 1] float32).

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.

    Source: contracts of ONNX Runtime's com.microsoft::MoERouter.
    """
    return call("moe_router", locals())


def moe_group_router(
    *,
    logits: Any,
    expert_bias: Any,
    projection_weight: Any = None,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    group_topk: int = 2,
    router_sentinel: float = -10000.0,
    full_scores: bool = False,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Group-limited router: keeps the best groups, then chooses experts in them by sigmoid(logits) + expert_bias.

    Args:
        logits: [..., E] float32, float16 or bfloat16; with projection_weight [num_tokens, width].
        expert_bias: [E] float32.
        projection_weight: [E, width], the type of logits, width a multiple of 256; implies full_scores.
        top_k: experts of a token.
        n_group, topk_group, group_topk: groups, groups kept, experts whose sum ranks a group.
        router_sentinel: written where an expert is not chosen.
        full_scores: all scores instead of a choice; needs n_group = topk_group = 1.
        out: (router_probs, selection_scores, router_weights), None for new arrays.

    Returns:
        (router_probs, None, None), or with full_scores (None, selection_scores, router_weights) in float32.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.

    Source: ONNX Runtime com.microsoft::MoEGroupRouter.
    """
    return call("moe_group_router", locals())
